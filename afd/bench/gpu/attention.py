"""Decode attention of Step-3 alone: our kernel beside FlashAttention 3, and beside the memory.

64 query heads on one key/value head of 256, an FP8 cache in pages of 64 tokens as vLLM lays it out,
one new token per request. Launches are replayed from a captured graph and go through caches that
are larger together than the L2 cache. A cell is how many requests there are and how long.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from afd.bench.gpu.common import Budget, Report, parser, report
from afd.errors import ConfigError
from afd.planner.facts.hardware import load_accelerator

HEADS, HEAD_DIM = 64, 256


@dataclass(frozen=True)
class Cell:
    """name: of the load. lengths: tokens in the cache, one number per request."""

    name: str
    lengths: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """FP8 keys and values of all tokens."""
        return 2 * HEAD_DIM * sum(self.lengths)


def cells(seed: int) -> dict[str, Cell]:
    """By name. The mixed one draws its lengths."""
    even = [
        (1, 32768), (8, 8192), (32, 4096), (64, 4096), (128, 1024), (128, 4096), (128, 16384),
        (128, 32768), (256, 4096),
    ]  # fmt: skip
    draw = random.Random(seed)
    mixed = tuple(draw.randint(256, 8192) for _ in range(128))
    every = [Cell(f"{n}x{length}", (length,) * n) for n, length in even]
    return {cell.name: cell for cell in [*every, Cell("128x256-8192", mixed)]}


def main(argv: Sequence[str]) -> int:
    made = parser("attention", __doc__, 60.0)
    made.add_argument("--cells", nargs="*", metavar="REQUESTSxTOKENS", help="default: all")
    args = made.parse_args(argv)
    known = cells(args.seed)
    names = args.cells or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"no cell {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in names]
    if args.device == "cpu":
        chosen = [Cell(cell.name, tuple(min(n, 40) for n in cell.lengths[:3])) for cell in chosen]
    out, budget = report("attention", args, "attention", argv), Budget(args.seconds)
    # Imported here: `afd bench gpu --help` needs no torch.
    from afd.bench.gpu.attention_torch import measure

    for cell in chosen:
        if budget.allows(cell.name):
            ours, peer = measure(cell.lengths, HEADS, HEAD_DIM, args.device)
            _record(cell, ours, peer, out)
    return 0


def _record(cell: Cell, ours_us: float, peer_us: float, out: Report) -> None:
    least_us = 1e6 * cell.kv_bytes / load_accelerator("h200").memory_bandwidth
    print(
        f"{cell.name}: {ours_us:.1f} us, FlashAttention 3 {peer_us:.1f} ({peer_us / ours_us:.2f}),"
        f" memory of an H200 {least_us:.1f}",
        flush=True,
    )
    case = f"step-3 decode attention, FP8, {cell.name}"
    out.add(case, "us", ours_us, "us", "FlashAttention 3", peer_us, more_is_better=False)
    memory = "H200 memory bandwidth"
    out.add(case, "us_beside_memory", ours_us, "us", memory, least_us, more_is_better=False)
