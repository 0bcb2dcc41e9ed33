"""The planner: models and accelerators as data, what a decode step costs, and which xAyF to run.

Pure Python and numpy. ``model`` and ``hardware`` hold facts, ``cost`` and ``colocated`` turn them
into stage times, ``budget`` holds the closed formulas, ``paper`` the source's tables.
"""
