"""How long decode steps take, by their rows and depth, as the attention side sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afd.depth import bucket_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True)
class Timed:
    """Steps of one bucket and depth, added up; seconds: from each one's start to the next one's."""

    steps: int = 0
    seconds: float = 0.0


class DecodeSteps:
    """Totals since the start. One thread writes; another may read.

    A step counts if another one followed at once: then its time is the time per output token of its
    requests, sampling and scheduling included.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[int, int], Timed] = {}
        self._open: tuple[int, int] | None = None
        self._since = 0.0

    def begin(self, rows: int, depth: int, now: float, *, decode: bool) -> None:
        """A step begins, and the one before it is over. decode: it has one row per request."""
        if self._open is not None:
            known = self._totals.get(self._open, Timed())
            seconds = known.seconds + now - self._since
            self._totals[self._open] = Timed(known.steps + 1, seconds)
        self._open = (bucket_of(rows), depth) if decode else None
        self._since = now

    def pause(self) -> None:
        """No step follows at once."""
        self._open = None

    def totals(self) -> Mapping[tuple[int, int], Timed]:
        """By (bucket, depth)."""
        return dict(self._totals)


def depth_families(
    steps: DecodeSteps, depths: Callable[[], Iterable[tuple[int, int]]] | None
) -> Iterator[Metric]:
    """What was timed, and the depths chosen by it, for a Prometheus registry."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["rows", "depth"]
    count = CounterMetricFamily(
        "afd_decode_steps", "Decode steps that another step followed at once.", labels=labels
    )
    seconds = CounterMetricFamily(
        "afd_decode_step_seconds", "Time from their start to the next step's.", labels=labels
    )
    for (rows, depth), timed in sorted(steps.totals().items()):
        count.add_metric([str(rows), str(depth)], timed.steps)
        seconds.add_metric([str(rows), str(depth)], timed.seconds)
    yield count
    yield seconds
    chosen = GaugeMetricFamily(
        "afd_decode_depth", "Depth for decode steps of up to so many rows.", labels=["rows"]
    )
    for rows, depth in depths() if depths is not None else ():
        chosen.add_metric([str(rows)], depth)
    yield chosen
