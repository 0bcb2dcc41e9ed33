"""The search for the best plan, and the verdict whether to disaggregate."""
