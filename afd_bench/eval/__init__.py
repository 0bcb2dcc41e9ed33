"""`afd eval`: measures a deployment's deviation from colocated vLLM on held-out text."""
