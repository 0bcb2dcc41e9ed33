"""`afd bench scale`: large deployments on the CPU, with every process but without vLLM."""
