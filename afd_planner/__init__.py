"""The planner: chooses an xAyF deployment, and decides whether disaggregation pays.

Uses numpy only, no torch. Each package imports only packages listed above it:

facts     models and accelerators, read from data files
cost      time and memory of a decode step: stages, budgets, measured times, colocated serving
paper     the tables of the Step-3 report, recomputed from facts and cost
simulate  `afd simulate`: a deployment step by step, with jitter, arrivals and failures
sizing    the search over xAyF and colocated plans, and the verdict
report    a plan as text, JSON, plots and deployment file; the presets

``command`` runs `afd plan` and ``arguments`` parses its command line.
"""
