"""The search for the best plan, and the verdict on it."""
