"""A plan as text, JSON and plots."""
