"""The ranks of :mod:`afd_launch.reduce_check`: ``python -m afd_launch.reduce_ranks_torch``.

Arguments: device, ranks, seconds. Rank 0 prints one line of JSON. The other ranks are forked, so
that torch is imported once; no process has touched a GPU by then.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import time

import torch

from afd.devices import device_named
from ffn_worker.allreduce.base import Collective
from ffn_worker.allreduce.selection import make_collective

TURNS = 5
SMALL = 8 << 10
LARGE_CPU, LARGE_GPU = 4 << 20, 256 << 20
_HIDDEN = 4096
_START_S = 60.0


def main() -> int:
    device, ranks, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/ranks"
        others = [
            context.Process(target=_rank, args=(device, rank, ranks, address, seconds), daemon=True)
            for rank in range(1, ranks)
        ]
        for other in others:
            other.start()
        found = _rank(device, 0, ranks, address, seconds)
        for other in others:
            other.join(_START_S)
    print(json.dumps(found), flush=True)
    return 0


def _rank(device: str, rank: int, ranks: int, address: str, seconds: float) -> dict[str, object]:
    torch.set_num_threads(1)
    kind = device_named(device).torch_type
    where = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.cuda.set_device(where)
    made = make_collective("auto", "exact", rank, ranks, address, where, start_s=_START_S)
    large = LARGE_CPU if kind == "cpu" else LARGE_GPU
    ones = torch.full((1, _HIDDEN), float(rank + 1), dtype=torch.bfloat16, device=where)
    expected = ranks * (ranks + 1) / 2
    right = bool((made.all_reduce(ones) == expected).all())
    found = {
        "right": right,
        "backend": made.name,
        "small": SMALL,
        "large": large,
        "small_s": _times(made, where, SMALL, seconds),
        "large_s": _times(made, where, large, seconds),
    }
    made.close()
    return found


def _times(made: Collective, where: torch.device, nbytes: int, seconds: float) -> list[float]:
    """Seconds of a call, in each turn. Every rank makes the same number of calls: rank 0's."""
    x = torch.zeros(nbytes // 2 // _HIDDEN, _HIDDEN, dtype=torch.bfloat16, device=where)
    _turn(made, x, 2)
    wanted = max(2, min(2_000, int(seconds / TURNS / _turn(made, x, 3))))
    # The ranks agree by adding up: all but rank 0 add nothing. Whole numbers up to 256 are exact.
    exponent = torch.zeros(1, _HIDDEN, dtype=torch.bfloat16, device=where)
    if made.rank == 0:
        exponent += wanted.bit_length() - 1
    calls = 1 << int(made.all_reduce(exponent)[0, 0].item())
    return [_turn(made, x, calls) for _ in range(TURNS)]


def _turn(made: Collective, x: torch.Tensor, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        made.all_reduce(x)
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return (time.perf_counter() - began) / calls


if __name__ == "__main__":
    sys.exit(main())
