"""`afd eval`: how far a deployment is from colocated vLLM on held-out text, and its limits."""
