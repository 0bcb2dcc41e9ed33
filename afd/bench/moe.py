"""`afd bench moe`, which belongs to the FFN worker: see ffn_worker/bench/cli.py."""

from ffn_worker.bench.cli import main

__all__ = ["main"]
