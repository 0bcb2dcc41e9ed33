"""A discrete-event simulator of a disaggregated deployment. Pure Python and numpy.

``load_spec`` reads a YAML file, ``simulate`` runs it; docs/simulator.md says what is exact.
"""
