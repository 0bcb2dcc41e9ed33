"""`afd bench kernels`: times of the kernels of a decode step on one GPU, for the planner."""
