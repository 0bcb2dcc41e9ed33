"""The deployment file, the facts derived from it, and the file each role is given."""
