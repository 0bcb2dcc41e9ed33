"""The planner: which xAyF deployment to run, and whether to disaggregate at all.

Pure Python and numpy. Rooms, each importing only those above it:

facts     models and accelerators as data
cost      what a decode step costs: stages, memory, budgets, measured times, the colocated step
paper     the Step-3 report's tables, recomputed from both
simulate  a deployment step by step: jitter, arrivals, uneven experts, failures
sizing    the search over xAyF and colocated plans, and the verdict
report    a plan as text, JSON, plots and deployment file; the presets
"""
