"""What the cost model prices: pools, micro-batches, number formats and efficiencies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from afd.errors import ConfigError
from afd_planner.cost.interpolate import Array
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.precision import Precision

Rows = TypeVar("Rows", float, Array)

FIXED_TIMES = (
    "attention_overhead_s",
    "ffn_overhead_s",
    "latent_overhead_s",
    "handover_s",
    "turn_s",
    "wire_latency_s",
    "collective_latency_s",
    "step_overhead_s",
    "host_s",
    "host_row_s",
)
"""Fields of Efficiency that are seconds."""


@dataclass(frozen=True)
class Efficiency:
    """Share of data-sheet values that real kernels and networks reach, and fixed times.

    docs/planner-model.md says how the defaults were chosen.

    Attributes:
        matmul: Share of peak FLOP/s in projections and FFN.
        attention: Share of peak FLOP/s in the attention core.
        memory: Share of memory bandwidth.
        network: Share of NIC bandwidth.
        scale_up: Share of the bandwidth of links inside a server.
        hidden_collectives: Share of collective time inside a server that overlaps with compute.
        hidden_exchange: Share of the all-to-all of colocated expert parallelism that two
            micro-batches hide.
        memory_use: Share of GPU memory available to weights and cache.
        query_tile: Rows of a matrix tile that an attention kernel fills with the query heads of one
            key-value head. Fewer heads cost the same (Hopper's wgmma has 64 rows).
        attention_overhead_s, ffn_overhead_s: Fixed seconds per layer and micro-batch in each pool.
        latent_overhead_s: Further ones of latent attention (MLA), which runs more kernels.
        handover_s: Further ones of attention under AFD, for what a colocated layer does not do:
            adding up answers, encoding rows, and kernels that vLLM's compiled layers would fuse.
        turn_s: Fixed seconds between two micro-batches of the busiest pool under AFD: its wait sees
            the next message, and the first kernel starts.
        wire_latency_s: Fixed seconds per message.
        collective_latency_s: Fixed seconds per collective.
        step_overhead_s: Fixed seconds per step (scheduling, sampling).
        host_s, host_row_s: Seconds per step, and per sequence of one scheduler, that the host needs
            beside the GPUs. It works ahead, so a step takes at least as long.
        kernels: Whether the kernel times measured on an accelerator (afd_planner/data/kernels)
            correct its rooflines.
        equal_lengths: Whether all requests are equally long, as in most benchmarks. Attention
            kernels divide the cache of such requests more evenly, and take up to 1.6 times as long
            for others.
    """

    matmul: float = 0.75
    attention: float = 0.75
    memory: float = 0.85
    network: float = 0.80
    scale_up: float = 0.75
    hidden_collectives: float = 0.65
    hidden_exchange: float = 0.55
    memory_use: float = 0.92
    query_tile: int = 64
    attention_overhead_s: float = 60e-6
    ffn_overhead_s: float = 30e-6
    latent_overhead_s: float = 0.0
    handover_s: float = 0.0
    turn_s: float = 0.0
    wire_latency_s: float = 20e-6
    collective_latency_s: float = 10e-6
    step_overhead_s: float = 1e-3
    host_s: float = 2.2e-3
    host_row_s: float = 17e-6
    kernels: bool = False
    equal_lengths: bool = False

    def __post_init__(self) -> None:
        # Every comparison with NaN is false, so NaN is refused too.
        shares = ("matmul", "attention", "memory", "network", "scale_up", "memory_use")
        for name in shares:
            if not 0 < self.__dict__[name] <= 1:
                raise ConfigError(f"efficiency {name} is {self.__dict__[name]}; give (0, 1]")
        if not 1 <= self.query_tile < math.inf:
            raise ConfigError(f"efficiency query_tile is {self.query_tile}; give at least 1")
        for name in ("hidden_collectives", "hidden_exchange"):
            if not 0 <= self.__dict__[name] <= 1:
                raise ConfigError(f"efficiency {name} is {self.__dict__[name]}; give [0, 1]")
        for name in FIXED_TIMES:
            if not 0 <= self.__dict__[name] <= 1:
                raise ConfigError(
                    f"efficiency {name} is {self.__dict__[name]}; give seconds between 0 and 1"
                )

    def host_seconds(self, rows: Rows) -> Rows:
        """Returns the least seconds of a step of ``rows`` sequences of one scheduler."""
        return self.host_s + self.host_row_s * rows


def calibrated(accelerators: Sequence[Accelerator]) -> Efficiency:
    """Returns the efficiencies measured on these accelerators, if they are of one kind that has
    some, else the defaults."""
    fitted = {accelerator.name: accelerator.efficiency for accelerator in accelerators}
    if len(fitted) > 1:
        return Efficiency()
    return Efficiency(**{k: v for each in fitted.values() for k, v in each.items()})  # type: ignore[arg-type]  # query_tile is the one int


IDEAL = Efficiency(
    matmul=1,
    attention=1,
    memory=1,
    network=1,
    scale_up=1,
    hidden_collectives=1,
    hidden_exchange=1,
    memory_use=1,
    query_tile=1,
    attention_overhead_s=0,
    ffn_overhead_s=0,
    latent_overhead_s=0,
    handover_s=0,
    turn_s=0,
    wire_latency_s=0,
    collective_latency_s=0,
    step_overhead_s=0,
    host_s=0,
    host_row_s=0,
)
"""Data-sheet rates without overhead: the assumption of Step-3 report section 4.2."""


@dataclass(frozen=True)
class Routing:
    """How rows are distributed over experts.

    Attributes:
        imbalance: Rows of the busiest expert shard over the mean, at least 1. It multiplies the
            rows that an FFN GPU computes.
        redundant: Copies of experts per shard and layer, beside its own (ffn.redundant_experts).
    """

    imbalance: float = 1.0
    redundant: int = 0

    def __post_init__(self) -> None:
        if self.imbalance < 1:
            raise ConfigError(f"expert imbalance is {self.imbalance}; it must be at least 1")
        if self.redundant < 0:
            raise ConfigError(f"{self.redundant} redundant experts are invalid; give 0 or more")


EVEN_ROUTING = Routing()


@dataclass(frozen=True)
class Pool:
    """``instances`` equal instances of ``gpus`` GPUs each.

    ``tp`` GPUs form a group. In an attention pool the gpus / tp groups of an instance are
    data-parallel. In an FFN pool they are expert-parallel: the routed experts are divided over all
    groups of all instances.
    """

    accelerator: Accelerator
    instances: int
    gpus: int
    tp: int = 1

    def __post_init__(self) -> None:
        if min(self.instances, self.gpus, self.tp) < 1 or self.gpus % self.tp:
            raise ConfigError(
                f"a pool of {self.instances} instances of {self.gpus} GPUs cannot run TP "
                f"{self.tp}; use a TP that divides the GPUs of an instance"
            )

    @property
    def total_gpus(self) -> int:
        return self.instances * self.gpus

    @property
    def groups(self) -> int:
        """Number of data-parallel (attention) or expert-parallel (FFN) groups of the pool."""
        return self.total_gpus // self.tp

    @property
    def price_per_hour(self) -> float:
        """USD for the whole pool."""
        return self.total_gpus * self.accelerator.price_per_hour


@dataclass(frozen=True)
class AfdShape:
    """An xAyF deployment at one operating point.

    Attributes:
        depth: Micro-batches in flight.
        rows: Decode rows (sequences) of one micro-batch, over all attention instances.
        context: Mean number of tokens attended to.
        dense_on_ffn: Whether dense FFN layers run in the FFN pool, as in the Step-3 report.
            ``afd serve`` runs them with attention (False).
        draft: Draft tokens that a step verifies per row, in addition to the one that it decodes.
    """

    attention: Pool
    ffn: Pool
    depth: int
    rows: float
    context: float
    precision: Precision = field(default_factory=Precision)
    routing: Routing = EVEN_ROUTING
    dense_on_ffn: bool = False
    draft: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch in projections, wire and FFN."""
        return self.rows * (1 + self.draft)

    @property
    def one_server(self) -> bool:
        """Whether both pools fit into one server, so that rows use its links, not the NICs."""
        accelerator = self.attention.accelerator
        same = accelerator.name == self.ffn.accelerator.name
        return same and self.total_gpus <= accelerator.gpus_per_server

    @property
    def batch(self) -> float:
        """Sequences that the deployment decodes at the same time."""
        return self.depth * self.rows

    @property
    def total_gpus(self) -> int:
        return self.attention.total_gpus + self.ffn.total_gpus

    @property
    def price_per_hour(self) -> float:
        return self.attention.price_per_hour + self.ffn.price_per_hour


@dataclass(frozen=True)
class ColocatedShape:
    """A colocated deployment at one operating point: ``gpus`` equal GPUs hold the whole model.

    Attributes:
        tp: GPUs per data-parallel attention group.
        ep: Expert shards, each on gpus / ep GPUs. 1 means TP over all GPUs, which then form one
            group.
        rows: Decode rows of one step, over all GPUs.
        overlap: Whether two micro-batches hide part of the all-to-all (DeepSeek-V3 report section
            3.4.2).
        draft: As in AfdShape.
    """

    accelerator: Accelerator
    gpus: int
    tp: int
    ep: int
    rows: float
    context: float
    precision: Precision = field(default_factory=Precision)
    routing: Routing = EVEN_ROUTING
    overlap: bool = False
    draft: int = 0

    def __post_init__(self) -> None:
        if min(self.gpus, self.tp, self.ep) < 1 or self.gpus % self.tp or self.gpus % self.ep:
            raise ConfigError(
                f"{self.gpus} GPUs cannot run TP {self.tp} with EP {self.ep}; use divisors of"
                f" {self.gpus}"
            )
        if self.ep == 1 and self.tp != self.gpus:
            raise ConfigError(
                f"EP 1 needs all {self.gpus} GPUs in one TP group, but TP is {self.tp}; use TP "
                f"{self.gpus}, or an EP above 1"
            )

    @property
    def dp(self) -> int:
        return self.gpus // self.tp

    @property
    def price_per_hour(self) -> float:
        return self.gpus * self.accelerator.price_per_hour
