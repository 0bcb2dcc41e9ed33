"""Models and accelerators as data."""
