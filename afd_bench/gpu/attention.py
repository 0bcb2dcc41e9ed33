"""Decode attention of Step-3: our kernel against FlashAttention 3 and against memory bandwidth.

64 query heads on one key/value head of 256, an FP8 cache in vLLM's layout with pages of 64 tokens,
one new token per request. Launches are replayed from a graph and use several caches in turn, which
together exceed the L2 cache. A cell is a number of requests and their length.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from afd.errors import ConfigError
from afd_bench.gpu.common import Budget, Report, parser, report
from afd_planner.facts.hardware import load_accelerator

HEADS, HEAD_DIM = 64, 256


@dataclass(frozen=True)
class Cell:
    """One load. lengths: tokens in the cache, per request."""

    name: str
    lengths: tuple[int, ...]

    @property
    def kv_bytes(self) -> int:
        """Bytes of the FP8 keys and values of all tokens."""
        return 2 * HEAD_DIM * sum(self.lengths)


def cells(seed: int) -> dict[str, Cell]:
    """Returns all cells by name. seed: of the lengths in the mixed cell."""
    even = [
        (1, 32768), (8, 8192), (32, 4096), (64, 4096), (128, 1024), (128, 4096), (128, 16384),
        (128, 32768), (256, 4096),
    ]  # fmt: skip
    draw = random.Random(seed)
    mixed = tuple(draw.randint(256, 8192) for _ in range(128))
    every = [Cell(f"{n}x{length}", (length,) * n) for n, length in even]
    return {cell.name: cell for cell in [*every, Cell("128x256-8192", mixed)]}


def main(argv: Sequence[str]) -> int:
    options = parser("attention", __doc__, 60.0)
    options.add_argument("--cells", nargs="*", metavar="REQUESTSxTOKENS", help="default: all")
    args = options.parse_args(argv)
    known = cells(args.seed)
    names = args.cells or list(known)
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ConfigError(f"unknown cells {', '.join(unknown)}; use some of {', '.join(known)}")
    chosen = [known[name] for name in names]
    if args.device == "cpu":
        chosen = [Cell(cell.name, tuple(min(n, 40) for n in cell.lengths[:3])) for cell in chosen]
    out, budget = report("attention", args, "attention", argv), Budget(args.seconds)
    # Imported here: `afd bench gpu --help` needs no torch.
    from afd_bench.gpu.attention_torch import measure

    for cell in chosen:
        if budget.allows(cell.name):
            ours, peer = measure(cell.lengths, HEADS, HEAD_DIM, args.device)
            _record(cell, ours, peer, out)
    return 0


def _record(cell: Cell, ours_us: float, peer_us: float, out: Report) -> None:
    least_us = 1e6 * cell.kv_bytes / load_accelerator("h200").memory_bandwidth
    print(
        f"{cell.name}: {ours_us:.1f} us, FlashAttention 3 {peer_us:.1f} us"
        f" ({peer_us / ours_us:.2f}x), lower bound by the memory bandwidth of an H200"
        f" {least_us:.1f} us",
        flush=True,
    )
    case = f"step-3 decode attention, FP8, {cell.name}"
    out.add(case, "us", ours_us, "us", "FlashAttention 3", peer_us, more_is_better=False)
    memory = "H200 memory bandwidth"
    out.add(case, "us_beside_memory", ours_us, "us", memory, least_us, more_is_better=False)
