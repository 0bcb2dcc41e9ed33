"""Benchmarks: `afd bench NAME`. Every module has ``main(argv) -> exit code``."""
