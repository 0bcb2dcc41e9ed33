"""Faults under load: `afd bench faults` and `afd bench soak`."""
