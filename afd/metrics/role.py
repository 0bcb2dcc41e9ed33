"""The afd_* metrics of attention and FFN processes: plain counters, rendered on each scrape.

Recording is a list index and an addition, without locks, allocations or prometheus_client calls.
One thread, which runs the steps, writes; the scrape thread only reads. docs/metrics.md lists names,
units and roles.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from afd.metrics.decode_steps import DecodeSteps, depth_families
from afd.metrics.step_trace import StepTrace, StepTraces
from afd.metrics.wire import WireTrace, inbound_counts, wire_families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Role = Literal["attention", "ffn"]

# Upper bounds, from 10 us (less than one shared-memory message) to 10 s (more than any stage).
SECONDS_BOUNDS: tuple[float, ...] = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3,
    1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
ROWS_BOUNDS: tuple[float, ...] = tuple(float(2**power) for power in range(15))  # 1 .. 16384


class Stage(enum.IntEnum):
    """A stage of one micro-batch in one layer. The value is an index into a list."""

    ATTENTION = 0  # norm, attention, residual, norm, router
    A2F = 1  # from post() of the attention side to arrival on the FFN side
    FFN = 2  # experts of one layer for one micro-batch of all attention instances
    F2A = 3  # from post() of the FFN side to arrival on the attention side


class Direction(enum.IntEnum):
    A2F = 0
    F2A = 1


class Captured(enum.IntEnum):
    """When an FFN rank captured a graph."""

    START = 0  # before it was ready
    AFTER = 1


class Weights(enum.IntEnum):
    ATTENTION = 0
    EXPERT = 1


# Stages that a role exports from its first scrape on. Others are exported once observed.
_STAGES: dict[Role, tuple[Stage, ...]] = {
    "attention": (Stage.ATTENTION, Stage.F2A),
    "ffn": (Stage.A2F, Stage.FFN),
}
_OWN_STAGE: dict[Role, Stage] = {"attention": Stage.ATTENTION, "ffn": Stage.FFN}
# The stage that the transport of the receiving side measures.
_WIRE_STAGE: dict[Role, Stage] = {"attention": Stage.F2A, "ffn": Stage.A2F}
_SENDS: dict[Role, Direction] = {"attention": Direction.A2F, "ffn": Direction.F2A}
_PEERS: dict[Role, Role] = {"attention": "ffn", "ffn": "attention"}


@dataclass(frozen=True)
class HistogramSnapshot:
    """A copy of a histogram.

    counts: observations in (bounds[i-1], bounds[i]]; the last one counts values above all bounds.
    total: sum of the values, in their own unit (seconds, rows).
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class StageHistogram:
    """A histogram with fixed buckets (by default for seconds) and one writing thread."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BOUNDS) -> None:
        """bounds: strictly increasing upper bounds. Raises ValueError otherwise."""
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"histogram bounds {bounds} are not strictly increasing")
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. NaN and negative values (from comparing two clocks) count as zero."""
        if not value >= 0.0:
            value = 0.0  # the sum is a counter and must not fall
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def total(self) -> float:
        return self._total

    def snapshot(self) -> HistogramSnapshot:
        """Returns a copy. Any thread may call it; it may miss a value just being observed."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


class RoleMetrics:
    """All metrics of one attention or FFN process. Only the thread that runs the steps writes.

    Counters, which never decrease:
        bubble_seconds  seconds that the compute side waited for peers inside a step
        wire_bytes      [Direction] bytes written into peers' slots, counted by the sender
        steps           [depth] steps with that many micro-batches
        graph_steps     [depth] steps that a GPU replayed as a graph
        graph_seconds   [depth] device time of these steps, from the first kernel to the last
        ffn_retries     attention: times that rows were sent again, by cause. lost: an FFN rank
                        restarted or registered again. rejoined: this instance did
        late_peers      ffn: times that a step continued without a late attention instance
        graph_captures  [Captured] ffn: graphs that were captured
        eager_steps     attention: steps that no graph ran although graphs are on, by reason
    Traces:
        wire_traces     by member id of the peer; set during start-up. They provide the role's wire
                        stage, so nothing observes that stage.
        step_traces     stage timestamps of the last steps (metrics.stage_every)
        decode_steps    attention: duration of decode steps by rows and depth
    Gauges:
        slots, slots_in_flight   slots of this process; slots posted and not yet answered
        peers_up                 connected members of the other role
    Set during start-up:
        ready           the role has told the control plane that it is ready; /ready answers with it
        expert_rows     ffn: returns, by layer, the rows that each expert has computed here
        decode_depths   attention: returns (bucket, depth) of decode steps if depth is auto
        weights_read_bytes, weights_held_bytes   [Weights] read from the checkpoint; held in memory
        more            families that are read at each scrape (afd.metrics.at_scrape)
    """

    __slots__ = (
        "_stages",
        "bubble_seconds",
        "decode_depths",
        "decode_steps",
        "eager_steps",
        "expert_rows",
        "ffn_retries",
        "graph_captures",
        "graph_seconds",
        "graph_steps",
        "late_peers",
        "more",
        "peers_up",
        "ready",
        "role",
        "rows_per_ffn_call",
        "slots",
        "slots_in_flight",
        "step_traces",
        "steps",
        "weights_held_bytes",
        "weights_read_bytes",
        "wire_bytes",
        "wire_traces",
    )

    def __init__(self, role: Role, *, slots: int = 0, max_depth: int = 3) -> None:
        self.role: Role = role
        self._stages = tuple(StageHistogram() for _ in Stage)
        self.rows_per_ffn_call = StageHistogram(ROWS_BOUNDS)
        self.bubble_seconds = 0.0
        self.wire_bytes = [0] * len(Direction)
        self.wire_traces: dict[str, WireTrace] = {}
        self.step_traces = StepTraces()
        self.decode_steps = DecodeSteps()
        self.decode_depths: Callable[[], Iterable[tuple[int, int]]] | None = None
        self.expert_rows: Callable[[], Mapping[int, Sequence[int]]] | None = None
        self.steps = [0] * (max_depth + 1)  # index 0 is unused
        self.graph_steps = [0] * (max_depth + 1)
        self.graph_seconds = [0.0] * (max_depth + 1)
        self.graph_captures = [0] * len(Captured)
        self.eager_steps: dict[str, int] = {}
        self.ffn_retries = {"lost": 0, "rejoined": 0}
        self.late_peers = 0
        self.slots = slots
        self.slots_in_flight = 0
        self.peers_up = 0
        self.ready = False
        self.more: list[Callable[[], Iterable[Metric]]] = []
        self.weights_read_bytes = [0] * len(Weights)
        self.weights_held_bytes = [0] * len(Weights)

    def stage(self, stage: Stage) -> StageHistogram:
        """Returns the histogram of a stage. Hot paths keep it in a local variable."""
        return self._stages[stage]

    @property
    def own_stage_seconds(self) -> float:
        """Total seconds of the stage that this role computes."""
        return self._stages[_OWN_STAGE[self.role]].total

    def note_replay(self, step: StepTrace) -> None:
        """Keep a replayed step and count its stages, which the host did not time."""
        own, sent = _OWN_STAGE[self.role], Stage.A2F if self.role == "attention" else Stage.F2A
        for span, worked_ns in zip(step.spans, step.worked_ns, strict=True):
            self._stages[own].observe(worked_ns / 1e9)
            self._stages[sent].observe((span.copied_ns - span.done_ns) / 1e9)
        self.bubble_seconds += step.waited_ns / 1e9
        self.step_traces.add(step)

    def exported_stages(self) -> tuple[tuple[Stage, HistogramSnapshot], ...]:
        """Returns the role's own stages and every other stage that was observed."""
        taken = ((stage, self._snapshot(stage)) for stage in Stage)
        return tuple(
            (stage, snap) for stage, snap in taken if snap.count or stage in _STAGES[self.role]
        )

    def _snapshot(self, stage: Stage) -> HistogramSnapshot:
        if stage is not _WIRE_STAGE[self.role]:
            return self._stages[stage].snapshot()
        return HistogramSnapshot(
            SECONDS_BOUNDS, *inbound_counts(list(self.wire_traces.values()), SECONDS_BOUNDS)
        )


class RoleCollector:
    """A prometheus_client custom collector for one RoleMetrics."""

    def __init__(self, metrics: RoleMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        # Imported late: prometheus_client loads an HTTP server and TLS, which the planner and the
        # tests of the hot path do not need.
        from prometheus_client.core import HistogramMetricFamily

        metrics = self._metrics
        stages = HistogramMetricFamily(
            "afd_stage_seconds",
            "Time of one stage of one micro-batch in one layer.",
            labels=["stage"],
        )
        for stage, snap in metrics.exported_stages():
            stages.add_metric([stage.name.lower()], _cumulative(snap), snap.total)
        yield stages
        rows = metrics.rows_per_ffn_call.snapshot()
        if metrics.role == "ffn" or rows.count:
            family = HistogramMetricFamily(
                "afd_rows_per_ffn_call",
                "Rows of all attention instances in one call of the experts.",
            )
            family.add_metric([], _cumulative(rows), rows.total)
            yield family
        if metrics.wire_traces:
            yield from wire_families(dict(metrics.wire_traces))
        if metrics.expert_rows is not None:
            yield _expert_rows(metrics.expert_rows())
        yield from _counters(metrics)
        if metrics.role == "attention":
            yield from depth_families(metrics.decode_steps, metrics.decode_depths)
        yield from _gauges(metrics)
        for families in metrics.more:
            yield from families()


def _counters(metrics: RoleMetrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    bubble = CounterMetricFamily(
        "afd_bubble_seconds",
        "Time that the compute side waited for its peers inside a step.",
        labels=["side"],
    )
    bubble.add_metric([metrics.role], metrics.bubble_seconds)
    yield bubble
    wire = CounterMetricFamily(
        "afd_wire_bytes",
        "Bytes written into peers' slots, counted by the sender.",
        labels=["direction"],
    )
    for direction in Direction:
        if metrics.wire_bytes[direction] or direction is _SENDS[metrics.role]:
            wire.add_metric([direction.name.lower()], metrics.wire_bytes[direction])
    yield wire
    steps = CounterMetricFamily(
        "afd_steps", "Steps, by their number of micro-batches.", labels=["depth"]
    )
    for depth, count in enumerate(metrics.steps[1:], start=1):
        steps.add_metric([str(depth)], count)
    yield steps
    if any(metrics.graph_steps):
        yield from _graph_counters(metrics)
    if any(metrics.graph_captures):
        yield _captures(metrics)
    if metrics.eager_steps:
        eager = CounterMetricFamily(
            "afd_eager_steps",
            "Steps that no graph ran although graphs are on, by reason.",
            labels=["reason"],
        )
        for reason, count in sorted(metrics.eager_steps.items()):
            eager.add_metric([reason], count)
        yield eager
    if metrics.role == "attention":
        retries = CounterMetricFamily(
            "afd_ffn_retries",
            "Times that rows were sent again after an FFN instance was lost.",
            labels=["cause"],
        )
        for cause, count in metrics.ffn_retries.items():
            retries.add_metric([cause], count)
        yield retries
    if metrics.role == "ffn" or metrics.late_peers:
        yield CounterMetricFamily(
            "afd_late_peers",
            "Times that a step continued without a late attention instance.",
            value=metrics.late_peers,
        )


def _captures(metrics: RoleMetrics) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "afd_ffn_graph_captures", "Graphs that the FFN rank has captured.", labels=["when"]
    )
    for when in Captured:
        family.add_metric([when.name.lower()], metrics.graph_captures[when])
    return family


def _expert_rows(by_layer: Mapping[int, Sequence[int]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "afd_expert_rows",
        "Rows that each routed expert has computed in this FFN instance.",
        labels=["layer", "expert"],
    )
    for layer, rows in by_layer.items():
        for expert, count in enumerate(rows):
            if count:  # an instance holds only some of the experts
                family.add_metric([str(layer), str(expert)], count)
    return family


def _graph_counters(metrics: RoleMetrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    steps = CounterMetricFamily(
        "afd_graph_steps", "Steps that the GPU replayed as a graph.", labels=["depth"]
    )
    seconds = CounterMetricFamily(
        "afd_graph_step_seconds",
        "Device time of the steps that the GPU replayed as a graph.",
        labels=["depth"],
    )
    for depth, count in enumerate(metrics.graph_steps[1:], start=1):
        steps.add_metric([str(depth)], count)
        seconds.add_metric([str(depth)], metrics.graph_seconds[depth])
    yield steps
    yield seconds


def _gauges(metrics: RoleMetrics) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    yield GaugeMetricFamily(
        "afd_slots_in_flight", "Slots posted and not yet answered.", value=metrics.slots_in_flight
    )
    yield GaugeMetricFamily("afd_slots", "Slots of this process.", value=metrics.slots)
    peers = GaugeMetricFamily(
        "afd_peers_up",
        "Members of the given role that this process is connected to.",
        labels=["role"],
    )
    peers.add_metric([_PEERS[metrics.role]], metrics.peers_up)
    yield peers
    read = GaugeMetricFamily(
        "afd_weights_read_bytes", "Bytes read from the checkpoint.", labels=["kind"]
    )
    held = GaugeMetricFamily(
        "afd_weights_held_bytes", "Bytes of weights held in memory.", labels=["kind"]
    )
    for kind in Weights:
        # Zeros are exported too: they show that attention holds no expert weights.
        read.add_metric([kind.name.lower()], metrics.weights_read_bytes[kind])
        held.add_metric([kind.name.lower()], metrics.weights_held_bytes[kind])
    yield read
    yield held


def _cumulative(snap: HistogramSnapshot) -> list[tuple[str, float]]:
    """Returns Prometheus buckets: (bound, observations up to it), ending with +Inf."""
    buckets: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip(snap.bounds, snap.counts, strict=False):
        seen += count
        buckets.append((repr(bound), seen))
    buckets.append(("+Inf", seen + snap.counts[-1]))
    return buckets
