"""`afd bench amd`: which rung of docs/amd.md each feature stands on, and the climb to rung 6."""
