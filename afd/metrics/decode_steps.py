"""Duration of decode steps by rows and depth, measured by the attention instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from afd.depth import bucket_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric


@dataclass(frozen=True)
class Timed:
    """Steps of one bucket and depth. ``seconds``: total time from each start to the next one."""

    steps: int = 0
    seconds: float = 0.0


class DecodeSteps:
    """Totals since the process started. One thread writes; another may read.

    Only steps that another step followed immediately are counted: their time is the time per output
    token, including sampling and scheduling.
    """

    def __init__(self) -> None:
        self._totals: dict[tuple[int, int], Timed] = {}
        self._open: tuple[int, int] | None = None
        self._since = 0.0

    def begin(self, rows: int, depth: int, now: float, *, decode: bool) -> None:
        """Begin a step, which ends the previous one.

        Args:
            now: time.monotonic(). decode: the step has one row per request.
        """
        if self._open is not None:
            known = self._totals.get(self._open, Timed())
            seconds = known.seconds + now - self._since
            self._totals[self._open] = Timed(known.steps + 1, seconds)
        self._open = (bucket_of(rows), depth) if decode else None
        self._since = now

    def pause(self) -> None:
        """Discard the open step: no step follows it immediately."""
        self._open = None

    def totals(self) -> Mapping[tuple[int, int], Timed]:
        """Totals by (bucket, depth)."""
        return dict(self._totals)


def depth_families(
    steps: DecodeSteps, depths: Callable[[], Iterable[tuple[int, int]]] | None
) -> Iterator[Metric]:
    """Yields the step times and the depths chosen from them, for a Prometheus registry."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    labels = ["rows", "depth"]
    count = CounterMetricFamily(
        "afd_decode_steps", "Decode steps that another step followed immediately.", labels=labels
    )
    seconds = CounterMetricFamily(
        "afd_decode_step_seconds",
        "Time from the start of these steps to the start of the next step.",
        labels=labels,
    )
    for (rows, depth), timed in sorted(steps.totals().items()):
        count.add_metric([str(rows), str(depth)], timed.steps)
        seconds.add_metric([str(rows), str(depth)], timed.seconds)
    yield count
    yield seconds
    chosen = GaugeMetricFamily(
        "afd_decode_depth",
        "Chosen depth of decode steps with up to this many rows.",
        labels=["rows"],
    )
    for rows, depth in depths() if depths is not None else ():
        chosen.add_metric([str(rows)], depth)
    yield chosen
