"""Facts about models and accelerators, read from data files and config.json."""
