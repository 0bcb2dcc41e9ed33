"""The afd_* metrics of attention and FFN processes: plain counters on the hot path, text on demand.

Recording is a list index and an addition: no lock, no prometheus_client call, no allocation. Every
number has one writer (the thread that runs the steps); the scrape thread only reads. The names,
units and the role that exports each of them are in docs/metrics.md.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from afd.decode_steps import DecodeSteps, depth_families
from afd.step_trace import StepTrace, StepTraces
from afd.wire_metrics import WireTrace, inbound_counts, wire_families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Role = Literal["attention", "ffn"]

# Upper bounds. 10 us is below the shortest hop of shared memory, 10 s is beyond any useful stage.
SECONDS_BOUNDS: tuple[float, ...] = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3,
    1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
)  # fmt: skip
ROWS_BOUNDS: tuple[float, ...] = tuple(float(2**power) for power in range(15))  # 1 .. 16384


class Stage(enum.IntEnum):
    """A stage of one micro-batch in one layer. An integer, so that it indexes a list directly."""

    ATTENTION = 0  # attention half: norm, attention, residual, norm, router
    A2F = 1  # from the attention side's post() until the rows have arrived on the FFN side
    FFN = 2  # experts of one layer for one micro-batch of all attention peers
    F2A = 3  # from the FFN side's post() until the rows have arrived on the attention side


class Direction(enum.IntEnum):
    A2F = 0
    F2A = 1


class Weights(enum.IntEnum):
    ATTENTION = 0
    EXPERT = 1


# What a role exports from its first scrape on; a role that records more exports that too.
_STAGES: dict[Role, tuple[Stage, ...]] = {
    "attention": (Stage.ATTENTION, Stage.F2A),
    "ffn": (Stage.A2F, Stage.FFN),
}
_OWN_STAGE: dict[Role, Stage] = {"attention": Stage.ATTENTION, "ffn": Stage.FFN}
# The stage that the receiving side's transport traces.
_WIRE_STAGE: dict[Role, Stage] = {"attention": Stage.F2A, "ffn": Stage.A2F}
_SENDS: dict[Role, Direction] = {"attention": Direction.A2F, "ffn": Direction.F2A}
_PEERS: dict[Role, Role] = {"attention": "ffn", "ffn": "attention"}


@dataclass(frozen=True)
class HistogramSnapshot:
    """counts[i] observations in (bounds[i-1], bounds[i]]; the last one is beyond every bound.

    total is in the unit observed (seconds, rows).
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class StageHistogram:
    """Fixed buckets, one writer. By default in seconds."""

    __slots__ = ("_bounds", "_counts", "_total")

    def __init__(self, bounds: tuple[float, ...] = SECONDS_BOUNDS) -> None:
        """bounds: upper bounds, strictly increasing; ValueError otherwise."""
        if not bounds or any(low >= high for low, high in pairwise(bounds)):
            raise ValueError(f"histogram bounds {bounds} are not strictly increasing")
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. A negative one (two clocks compared) or NaN counts as zero."""
        if not value >= 0.0:
            value = 0.0  # the sum is a counter and must not fall
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    @property
    def total(self) -> float:
        return self._total

    def snapshot(self) -> HistogramSnapshot:
        """Safe from another thread; may miss the value being observed at that moment."""
        return HistogramSnapshot(self._bounds, tuple(self._counts), self._total)


class RoleMetrics:
    """All metrics of one attention or FFN process. Set the attributes from the step's thread.

    Counters, only ever added to:
        bubble_seconds  the compute side waited for its peers inside a step, in seconds
        wire_bytes      [Direction] bytes written into peers' slots; counted by the sender
        steps           [depth] steps run with that many micro-batches
        graph_steps     [depth] those of them that a GPU replayed as a graph ...
        graph_seconds   [depth] ... and their time on the device, from the first kernel to the last
        ffn_retries     attention: a step's rows were sent again after an FFN instance was lost
        late_peers      ffn: an attention instance missed its deadline and the step went on
    Traces:
        wire_traces     by member id of the peer; filled while the process starts. They are the
                        role's wire stage, so nothing observes that one.
        step_traces     when the stages of the last steps ran (metrics.stage_every)
        decode_steps    attention: how long decode steps take, by rows and depth
    Gauges:
        slots, slots_in_flight   slots this process may use, and those posted and not yet answered
        peers_up                 members of the other role that are connected
    Set while the process starts:
        expert_rows     ffn: gives, by layer, the rows that each expert has computed here
        decode_depths   attention: gives (bucket, depth) of decode steps where depth is auto
        weights_read_bytes, weights_held_bytes   [Weights] from the checkpoint, and in memory
    """

    __slots__ = (
        "_stages",
        "bubble_seconds",
        "decode_depths",
        "decode_steps",
        "expert_rows",
        "ffn_retries",
        "graph_seconds",
        "graph_steps",
        "late_peers",
        "peers_up",
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
        self.steps = [0] * (max_depth + 1)  # index 0 unused: a step has at least one micro-batch
        self.graph_steps = [0] * (max_depth + 1)
        self.graph_seconds = [0.0] * (max_depth + 1)
        self.ffn_retries = 0
        self.late_peers = 0
        self.slots = slots
        self.slots_in_flight = 0
        self.peers_up = 0
        self.weights_read_bytes = [0] * len(Weights)
        self.weights_held_bytes = [0] * len(Weights)

    def stage(self, stage: Stage) -> StageHistogram:
        """Keep the answer in a local variable where even this call is too much."""
        return self._stages[stage]

    @property
    def own_stage_seconds(self) -> float:
        """The stage that this role computes, in total."""
        return self._stages[_OWN_STAGE[self.role]].total

    def note_replay(self, step: StepTrace) -> None:
        """Keep a replayed step, and count its stages: no host has timed them."""
        own, sent = _OWN_STAGE[self.role], Stage.A2F if self.role == "attention" else Stage.F2A
        for span, worked_ns in zip(step.spans, step.worked_ns, strict=True):
            self._stages[own].observe(worked_ns / 1e9)
            self._stages[sent].observe((span.copied_ns - span.done_ns) / 1e9)
        self.bubble_seconds += step.waited_ns / 1e9
        self.step_traces.add(step)

    def exported_stages(self) -> tuple[tuple[Stage, HistogramSnapshot], ...]:
        """The role's own stages, and any other that has been observed."""
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
    """Gives a RoleMetrics to a prometheus_client registry (its custom-collector protocol)."""

    def __init__(self, metrics: RoleMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        # Imported here: prometheus_client brings an HTTP server and TLS, which the planner and
        # the tests of the hot path do not need.
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
                "afd_rows_per_ffn_call", "Rows of all attention peers in one call of the experts."
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


def _counters(metrics: RoleMetrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    bubble = CounterMetricFamily(
        "afd_bubble_seconds",
        "Time the compute side waited for its peers inside a step.",
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
        "afd_steps", "Steps run, by the number of micro-batches in flight.", labels=["depth"]
    )
    for depth, count in enumerate(metrics.steps[1:], start=1):
        steps.add_metric([str(depth)], count)
    yield steps
    if any(metrics.graph_steps):
        yield from _graph_counters(metrics)
    if metrics.role == "attention" or metrics.ffn_retries:
        yield CounterMetricFamily(
            "afd_ffn_retries",
            "Times rows were sent again after an FFN instance was lost.",
            value=metrics.ffn_retries,
        )
    if metrics.role == "ffn" or metrics.late_peers:
        yield CounterMetricFamily(
            "afd_late_peers",
            "Times a step went on without an attention instance that was late.",
            value=metrics.late_peers,
        )


def _expert_rows(by_layer: Mapping[int, Sequence[int]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "afd_expert_rows",
        "Rows that each routed expert has computed in this instance.",
        labels=["layer", "expert"],
    )
    for layer, rows in by_layer.items():
        for expert, count in enumerate(rows):
            if count:  # an instance holds a part of the experts
                family.add_metric([str(layer), str(expert)], count)
    return family


def _graph_counters(metrics: RoleMetrics) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily

    steps = CounterMetricFamily(
        "afd_graph_steps", "Steps that the GPU replayed as a graph.", labels=["depth"]
    )
    seconds = CounterMetricFamily(
        "afd_graph_step_seconds", "Time of these steps on the device.", labels=["depth"]
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
    yield GaugeMetricFamily("afd_slots", "Slots this process may use.", value=metrics.slots)
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
        # Both kinds, zeros too: "attention holds no expert weights" is worth seeing.
        read.add_metric([kind.name.lower()], metrics.weights_read_bytes[kind])
        held.add_metric([kind.name.lower()], metrics.weights_held_bytes[kind])
    yield read
    yield held


def _cumulative(snap: HistogramSnapshot) -> list[tuple[str, float]]:
    """Prometheus buckets: the number of observations up to each bound, ending with +Inf."""
    buckets: list[tuple[str, float]] = []
    seen = 0
    for bound, count in zip(snap.bounds, snap.counts, strict=False):
        seen += count
        buckets.append((repr(bound), seen))
    buckets.append(("+Inf", seen + snap.counts[-1]))
    return buckets
