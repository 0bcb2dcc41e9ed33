"""`afd bench planner`: the planner against what was measured end to end, and where AFD wins."""
