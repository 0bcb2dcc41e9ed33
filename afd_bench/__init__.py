"""Benchmarks: `afd bench NAME`. Every benchmark module has ``main(argv) -> exit status``."""
