"""Every model family and stored format, in tiny checkpoints, beside colocated vLLM on CPUs."""
