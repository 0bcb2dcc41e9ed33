"""`afd bench planner`: the planner against what was measured end to end, and where AFD wins."""

from afd_bench.planner.command import main

__all__ = ["main"]
