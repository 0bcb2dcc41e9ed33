"""Metrics of message times per peer. The transport measures them; a scrape reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

# Upper bounds: doubling from 256 ns (about one shared-memory flag) to 8.6 s.
BOUNDS_NS: list[int] = [256 << power for power in range(26)]


class PathHistogram(Protocol):
    """An afd_comm.Histogram: times of one path, ns."""

    @property
    def count(self) -> int: ...
    @property
    def total_ns(self) -> int: ...
    def cumulative(self, bounds_ns: list[int]) -> list[int]: ...


class WireTrace(Protocol):
    """An afd_comm.PeerTrace: the paths of one peer's messages."""

    @property
    def inbound(self) -> PathHistogram: ...
    @property
    def outbound(self) -> PathHistogram: ...
    @property
    def round_trip(self) -> PathHistogram: ...
    @property
    def waiting(self) -> PathHistogram: ...
    @property
    def offset_error_ns(self) -> int: ...
    def events(self) -> list[tuple[int, int, int, int, bytes, int, int]]: ...


def wire_families(traces: Mapping[str, WireTrace]) -> Iterator[Metric]:
    """Yields the afd_wire_* metrics. ``traces``: by member id of the peer."""
    from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily

    seconds = HistogramMetricFamily(
        "afd_wire_seconds", "Time of one message on one path of the wire.", labels=["peer", "path"]
    )
    error = GaugeMetricFamily(
        "afd_wire_clock_error_seconds",
        "Largest error of one-way times of this peer, which come from two clocks.",
        labels=["peer"],
    )
    for peer, trace in traces.items():
        paths = (
            ("inbound", trace.inbound),
            ("outbound", trace.outbound),
            ("round_trip", trace.round_trip),
            ("waiting", trace.waiting),
        )
        for path, histogram in paths:
            seconds.add_metric([peer, path], _buckets(histogram), histogram.total_ns / 1e9)
        if trace.offset_error_ns >= 0:
            error.add_metric([peer], trace.offset_error_ns / 1e9)
    yield seconds
    yield error


def inbound_counts(
    traces: Iterable[WireTrace], bounds: tuple[float, ...]
) -> tuple[tuple[int, ...], float]:
    """Adds up the inbound times of all peers.

    Returns:
        (counts per bucket of ``bounds`` and one for larger values, total seconds)

    Args:
        bounds: upper bounds, seconds.
    """
    bounds_ns = [round(bound * 1e9) for bound in bounds]
    counts = [0] * (len(bounds) + 1)
    total_ns = 0
    for trace in traces:
        histogram = trace.inbound
        seen = 0
        for i, below in enumerate((*histogram.cumulative(bounds_ns), histogram.count)):
            counts[i] += below - seen
            seen = below
        total_ns += histogram.total_ns
    return tuple(counts), total_ns / 1e9


def _buckets(histogram: PathHistogram) -> list[tuple[str, float]]:
    counts = histogram.cumulative(BOUNDS_NS)
    pairs = [(repr(ns / 1e9), float(n)) for ns, n in zip(BOUNDS_NS, counts, strict=True)]
    return [*pairs, ("+Inf", float(histogram.count))]
