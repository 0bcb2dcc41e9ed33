"""What the planner answers: operating points, what binds them, the verdict. Frozen data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from afd.planner.cost.shape import AfdShape, ColocatedShape
from afd.planner.cost.stages import AfdStages
from afd.planner.sizing.request import Request


class Constraint(Enum):
    """What keeps a plan from carrying more rows."""

    ATTENTION_BANDWIDTH = "attention bandwidth"
    ATTENTION_COMPUTE = "attention compute"
    KV_CAPACITY = "KV capacity"
    MEMORY_FIT = "memory fit"  # weights fill most of the memory and leave little for the cache
    ATTENTION_STAGE = "attention stage"  # measured as a whole; likewise for the FFN
    FFN_STAGE = "FFN stage"
    FFN_COMPUTE = "FFN compute"
    FFN_WEIGHT_READS = "FFN weight reads"
    NETWORK = "network"
    SERVER_LINKS = "server-internal links"
    FIXED_TIMES = "fixed times of stages"
    SLO_SLOT = "SLO slot"  # one micro-batch's way around a layer, however idle the pools are


@dataclass(frozen=True)
class Operating:
    """One deployment at its best point within the service level.

    Attributes:
        shape: one unit, with its rows per micro-batch (per step, if colocated).
        copies: independent units.
        step_s: seconds of one decode step. tpot_s: seconds between tokens of a request.
        tokens_per_s: output tokens per second of all copies.
        gpus, price_per_hour: of all copies; USD.
        usd_per_million: per 10^6 output tokens.
        binding: what keeps it from carrying more rows.
        measured: stages whose time comes from a measurement, out of attention, ffn, wire, rest.
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

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_s / self.gpus

    @property
    def disaggregated(self) -> bool:
        return isinstance(self.shape, AfdShape)


class ReasonKind(Enum):
    """Why disaggregation loses or gains little here."""

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


@dataclass(frozen=True)
class Reason:
    """One reason with its numbers.

    value, limit: what was compared, in ``unit`` (rows, GPUs, sparsity, ms, ...). gain: how many
    times as good the best xAyF plan would be without this cost; 1 = no better.
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
    """From ``value`` on (GPUs, tokens or ms) disaggregation is ``ratio`` times as good."""

    kind: ChangeKind
    value: float
    ratio: float


@dataclass(frozen=True)
class Verdict:
    """Whether to disaggregate, and why.

    ratio: how many times as good the xAyF plan is as the colocated one (tokens/s, or tokens per
    USD); 0 where there is no xAyF plan. needed: ratio from which it is recommended.
    reasons: largest gain first; empty where recommended. changes: what would turn the verdict.
    """

    disaggregate: bool
    ratio: float
    needed: float
    reasons: tuple[Reason, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class ParetoPoint:
    """Best plans at one TPOT limit: tokens/s/GPU, and tokens per USD; 0 where nothing meets it."""

    tpot_s: float
    afd: float
    colocated: float
    afd_per_usd: float
    colocated_per_usd: float


@dataclass(frozen=True)
class Plan:
    """The answer to a request. ``stages``: of the xAyF plan's unit, for the timeline."""

    request: Request
    afd: Operating | None
    stages: AfdStages | None
    colocated: Operating | None
    verdict: Verdict
    pareto: tuple[ParetoPoint, ...]

    @property
    def chosen(self) -> Operating:
        """What is recommended."""
        best = self.afd if self.verdict.disaggregate else self.colocated
        found = best or self.afd
        assert found is not None, "make_plan raises where neither exists"
        return found
