"""Tiny random checkpoints in the layouts that publishers use: names, dtypes, index, config keys."""
