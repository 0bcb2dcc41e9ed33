"""Makes small random checkpoints of every family, for tests, demos and benchmarks."""
