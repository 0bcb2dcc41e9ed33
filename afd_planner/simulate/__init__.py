"""A discrete-event simulator of a disaggregated deployment. Uses numpy only.

``spec.load_spec`` reads a YAML file and ``engine.simulate`` runs it. docs/simulator.md lists what
is exact and what is not modelled.
"""
