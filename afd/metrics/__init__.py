"""Prometheus metrics of a role, its last steps and the trace of its last messages."""
