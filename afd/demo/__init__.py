"""Small random checkpoints of every supported family, for tests, demos and benchmarks."""
