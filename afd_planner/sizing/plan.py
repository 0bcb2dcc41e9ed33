"""The planner's result as frozen data: operating points, their bottlenecks, the verdict."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from afd_planner.cost.shape import AfdShape, ColocatedShape
from afd_planner.cost.stages import AfdStages
from afd_planner.sizing.error import Decision, ErrorBand
from afd_planner.sizing.request import Request


class Constraint(Enum):
    """The limit that keeps a plan from serving more rows."""

    ATTENTION_BANDWIDTH = "attention bandwidth"
    ATTENTION_COMPUTE = "attention compute"
    KV_CAPACITY = "KV capacity"
    MEMORY_FIT = "memory fit"  # weights leave less than half of the memory for the cache
    ATTENTION_STAGE = (
        "attention stage"  # measured stages are not divided into compute and bandwidth
    )
    FFN_STAGE = "FFN stage"
    FFN_COMPUTE = "FFN compute"
    FFN_WEIGHT_READS = "FFN weight reads"
    NETWORK = "network"
    SERVER_LINKS = "server-internal links"
    FIXED_TIMES = "fixed times of stages"
    HOST = "scheduler on the host"
    SLO_SLOT = "layer round trip"  # of one micro-batch; no resource is full


@dataclass(frozen=True)
class OperatingPoint:
    """One deployment at its best point within the TPOT limit.

    Attributes:
        shape: One unit with its rows per micro-batch (per step if colocated).
        copies: Number of independent units of this shape.
        step_s: Seconds of one decode step.
        tpot_s: Seconds between two tokens of a request.
        tokens_per_s: Output tokens per second of all copies and ``others``.
        gpus: GPUs of all copies and others.
        price_per_hour: USD per hour of all copies and others.
        usd_per_million: USD per 10^6 output tokens.
        binding: The limit that keeps it from serving more rows.
        measured: Names of stages with measured times, out of attention, ffn, wire and rest.
        others: Other units, on GPUs that no further copy fits into.
    """

    shape: AfdShape | ColocatedShape
    copies: int
    step_s: float
    tpot_s: float
    tokens_per_s: float
    gpus: int
    price_per_hour: float
    usd_per_million: float
    binding: Constraint
    measured: tuple[str, ...] = ()
    others: tuple[OperatingPoint, ...] = ()

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_s / self.gpus

    @property
    def disaggregated(self) -> bool:
        return isinstance(self.shape, AfdShape)


class ReasonKind(Enum):
    """Reasons why disaggregation loses or gains too little."""

    DENSE_MODEL = "dense model"
    TOO_FEW_GPUS = "too few GPUs"
    DEAD_ZONE = "dead zone: weight reads per micro-batch"
    SPARSITY_FLOOR = "sparsity floor"
    NETWORK = "network"
    KV_CAPACITY = "KV capacity"
    EXPERT_IMBALANCE = "expert imbalance"
    FIXED_TIMES = "fixed times of stages"
    DOES_NOT_FIT = "no xAyF unit fits"
    SLO = "no xAyF unit meets the SLO"
    NO_ADVANTAGE = "nothing to gain on these accelerators"
    NOT_SERVED = "not served"


@dataclass(frozen=True)
class Reason:
    """One reason with its numbers.

    Attributes:
        value, limit: The two numbers compared, in ``unit`` (rows, GPUs, ms, ...).
        gain: Score of the best xAyF plan without this cost, relative to the actual one.
    """

    kind: ReasonKind
    value: float
    limit: float
    unit: str
    gain: float = 1.0


class ChangeKind(Enum):
    GPUS = "gpus"
    CONTEXT = "context"
    TPOT = "tpot"


@dataclass(frozen=True)
class Change:
    """At ``value`` (GPUs, tokens or ms), disaggregation has ``ratio`` times the colocated score."""

    kind: ChangeKind
    value: float
    ratio: float


@dataclass(frozen=True)
class Routed:
    """The ratio of a verdict under one assumption about expert loads."""

    name: str
    ratio: float


@dataclass(frozen=True)
class Verdict:
    """Whether to disaggregate, and why.

    Attributes:
        decision: UNDECIDED if the error of the model, or expert loads, could change the answer.
        ratio: Score of the xAyF plan over that of the colocated plan (tokens/s, or tokens per USD);
            0 without an xAyF plan, inf without a colocated plan.
        error: The model's error of the ratio.
        routed: The ratio under even, measured and worst expert loads.
        reasons: Costs of disaggregation, largest gain first; empty if recommended.
        changes: Other requests for which disaggregation would win.
        not_served: What of the request `afd serve` does not run.
    """

    decision: Decision
    ratio: float
    error: ErrorBand
    routed: tuple[Routed, ...]
    reasons: tuple[Reason, ...]
    changes: tuple[Change, ...]
    not_served: tuple[str, ...] = ()

    @property
    def disaggregate(self) -> bool:
        return self.decision is Decision.DISAGGREGATE


@dataclass(frozen=True)
class ParetoPoint:
    """Best plans at one TPOT limit: tokens/s/GPU and tokens per USD; 0 if no plan meets it."""

    tpot_s: float
    afd: float
    colocated: float
    afd_per_usd: float
    colocated_per_usd: float


@dataclass(frozen=True)
class Plan:
    """The planner's result for a request. ``stages``: stage times of the xAyF unit."""

    request: Request
    afd: OperatingPoint | None
    stages: AfdStages | None
    colocated: OperatingPoint | None
    verdict: Verdict
    pareto: tuple[ParetoPoint, ...]

    @property
    def chosen(self) -> OperatingPoint:
        """The recommended operating point; the colocated one while undecided."""
        best = self.afd if self.verdict.disaggregate else self.colocated
        found = best or self.afd
        assert found is not None, "make_plan raises where neither exists"
        return found
