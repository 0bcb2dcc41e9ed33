"""Writes the page of `afd bench comm`, docs/results/comm.md, from the measured cells."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Times:
    """Times of one way at one size: half round trips in us, and GB/s of both directions."""

    p50: float
    p99: float
    max: float
    GBps: float

    @classmethod
    def of(cls, round_trips: npt.NDArray[np.int64], up: int, down: int) -> Times:
        """Summarises round trips. round_trips: ns [rounds]. up, down: bytes of the messages."""
        p50, p99, most = np.percentile(round_trips, (50, 99, 100)) / 2e3
        return cls(float(p50), float(p99), float(most), (up + down) / (2e3 * float(p50)))


Cells = dict[tuple[int, str], Times]
"""(bytes each way, way) -> times."""

_HEAD = """\
Two processes, each pinned to its own core, bounce a message. Times are half a round trip; GB/s is
the bytes of both directions over a round trip. All ways alternate within one run.

- `memcpy` is the lower limit: shared memory, memcpy and a flag, in C++.
- `shm` and `tcp` are AFD's transports, called from C++; `from Python` uses the same calls as the
  workers.
- ZeroMQ and gloo are called from Python without copies.

No receiver reads the payload. The maxima include preemption by other processes.
"""
_SLEEPING = """\
- If a waiter sleeps, its wake-up dominates the time. On a virtual machine some wake-ups wait for a
  timer tick, even in a plain loop of `send` and `epoll_wait`. A wait therefore polls for 50 us
  before it sleeps, and yields the core between polls.
- Zero-copy sends (MSG_ZEROCOPY) are off for the same host, where the kernel copies anyway. They
  have not been measured over a network card.
"""


def table(cells: Cells) -> str:
    """Returns a Markdown table with one row per size and way."""
    lines = [
        "| bytes each way | way | p50 us | p99 us | max us | GB/s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (size, name), t in cells.items():
        lines.append(
            f"| {size} | {name} | {t.p50:.2f} | {t.p99:.2f} | {t.max:.0f} | {t.GBps:.2f} |"
        )
    return "\n".join(lines)


def page(cells: Cells, host: str, command: str, date: str) -> str:
    """Returns the whole page; its statements are computed from the cells."""
    aims = "aims: 1.1 at 917504 B, and 0.2 us for a flag"
    lines = ["# Messages between two processes: CPU", ""]
    lines += _against(cells, "shm", "memcpy", "p50", aims)
    lines += _tracing(cells, "shm")
    lines += _tracing(cells, "tcp")
    for peer in ("ZeroMQ, tcp", "gloo"):
        for metric in ("p50", "p99"):
            lines += _against(cells, "tcp", peer, metric, "below 1 is a win")
    lines += [_SLEEPING, table(cells), "", f"`{command}`, {host}, {date}.", "", _HEAD]
    return "\n".join(lines)


def _sizes(cells: Cells, *ways: str) -> list[int]:
    return sorted({size for size, _ in cells if all((size, way) in cells for way in ways)})


def _against(cells: Cells, ours: str, peer: str, metric: str, remark: str) -> list[str]:
    sizes = _sizes(cells, ours, peer)
    if not sizes:
        return []
    times = [
        (asdict(cells[size, ours])[metric], asdict(cells[size, peer])[metric]) for size in sizes
    ]
    ratios = [f"{a / b:.2f} at {size} B" for size, (a, b) in zip(sizes, times, strict=True)]
    return [f"- {metric} of {ours} over that of {peer}: {', '.join(ratios)} ({remark})."]


def _tracing(cells: Cells, way: str) -> list[str]:
    sizes = _sizes(cells, way, f"{way}, traced")
    if not sizes:
        return []
    costs = []
    for size in sizes:
        plain, traced = cells[size, way].p50, cells[size, f"{way}, traced"].p50
        costs.append(f"{traced - plain:+.2f} us ({100 * (traced / plain - 1):+.1f} %) at {size} B")
    return [f"- Tracing adds to a message over {way}: {', '.join(costs)} (aim: 1 %)."]
