"""What is deployed: pools, micro-batches and formats, as frozen facts that ``cost`` prices."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from afd.errors import ConfigError
from afd.planner.facts.hardware import Accelerator
from afd.planner.facts.precision import Precision
from afd.topology import expert_ranges


@dataclass(frozen=True)
class Efficiency:
    """What real kernels and networks reach of the data sheet. Shares of peak in (0, 1].

    matmul: projections and FFN. attention: attention core arithmetic. memory: memory bandwidth.
    network: NIC bandwidth. scale_up: server-internal links. hidden_collectives: share of collective
    time inside a server that overlaps with compute. hidden_exchange: share of the all-to-all of
    colocated expert parallelism that two micro-batches hide. memory_use: share of GPU memory that
    weights and cache may fill. query_tile: rows of a matrix tile that attention kernels fill with
    the query heads of one key-value head; fewer heads cost as much (64 rows of Hopper's wgmma). The
    rest are fixed times in seconds: per layer in each pool, per message on the wire, per
    collective, and per step (scheduling, sampling).

    docs/planner-model.md says how the defaults were chosen.
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
    wire_latency_s: float = 20e-6
    collective_latency_s: float = 10e-6
    step_overhead_s: float = 1e-3

    def __post_init__(self) -> None:
        shares = ("matmul", "attention", "memory", "network", "scale_up", "memory_use")
        for name in shares:
            if not 0 < self.__dict__[name] <= 1:
                raise ConfigError(f"efficiency {name} is {self.__dict__[name]}; give (0, 1]")
        if self.query_tile < 1:
            raise ConfigError(f"efficiency query_tile is {self.query_tile}; give at least 1")
        for name in ("hidden_collectives", "hidden_exchange"):
            if not 0 <= self.__dict__[name] <= 1:
                raise ConfigError(f"efficiency {name} is {self.__dict__[name]}; give [0, 1]")


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
    wire_latency_s=0,
    collective_latency_s=0,
    step_overhead_s=0,
)
"""Data sheet rates and no overhead: the assumption of Step-3 report section 4.2."""


@dataclass(frozen=True)
class Routing:
    """How rows load the experts.

    load: share of the chosen slots per routed expert, summing to 1 (None: even).
    imbalance: rows of the busiest expert shard over the mean, at least 1; it multiplies the rows
    that an FFN GPU computes.
    """

    load: tuple[float, ...] | None = None
    imbalance: float = 1.0

    def __post_init__(self) -> None:
        if self.imbalance < 1:
            raise ConfigError(f"expert imbalance is {self.imbalance}; it is at least 1")
        if self.load is not None and abs(sum(self.load) - 1) > 0.01:
            raise ConfigError(f"the routing load sums to {sum(self.load):.3f}; it must sum to 1")


EVEN = Routing()


def busiest_shard(load: Sequence[float], shards: int) -> float:
    """Load of the busiest of ``shards`` contiguous expert ranges over the mean load.

    The ranges are those of ``afd.topology.expert_ranges``.
    """
    sums = [sum(load[start:end]) for start, end in expert_ranges(len(load), shards)]
    return max(sums) * shards / sum(load)


@dataclass(frozen=True)
class Pool:
    """``instances`` equal instances of ``gpus`` GPUs each; ``tp`` GPUs share one row's work.

    Attention pool: gpus/tp data-parallel groups per instance. FFN pool: gpus/tp expert-parallel
    groups per instance, and the routed experts are divided over all groups of all instances.
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
        """Data-parallel (attention) or expert-parallel (FFN) groups of the whole pool."""
        return self.total_gpus // self.tp

    @property
    def price_per_hour(self) -> float:
        """USD for the whole pool."""
        return self.total_gpus * self.accelerator.price_per_hour


@dataclass(frozen=True)
class AfdShape:
    """An xAyF deployment at one operating point.

    rows: decode rows (sequences) of one micro-batch, over all attention instances together.
    context: mean tokens attended to. dense_on_ffn: dense FFN layers run in the FFN pool, as in the
    Step-3 report; ``afd serve`` keeps them with attention (False). draft: speculated tokens that a
    step verifies per row, besides the one it always decodes.
    """

    attention: Pool
    ffn: Pool
    depth: int
    rows: float
    context: float
    precision: Precision = field(default_factory=Precision)
    routing: Routing = EVEN
    dense_on_ffn: bool = False
    draft: int = 0

    @property
    def tokens(self) -> float:
        """Tokens of one micro-batch that pass through projections, wire and FFN."""
        return self.rows * (1 + self.draft)

    @property
    def one_server(self) -> bool:
        """Both pools fit one server, so that rows cross its internal links instead of NICs."""
        accelerator = self.attention.accelerator
        same = accelerator.name == self.ffn.accelerator.name
        return same and self.total_gpus <= accelerator.gpus_per_server

    @property
    def batch(self) -> float:
        """Sequences decoded at the same time by the whole deployment."""
        return self.depth * self.rows

    @property
    def total_gpus(self) -> int:
        return self.attention.total_gpus + self.ffn.total_gpus

    @property
    def price_per_hour(self) -> float:
        return self.attention.price_per_hour + self.ffn.price_per_hour


@dataclass(frozen=True)
class ColocatedShape:
    """The counterpart without disaggregation: ``gpus`` equal GPUs hold the whole model.

    tp: GPUs per data-parallel attention group. ep: expert shards, each on gpus/ep GPUs; 1 splits
    experts by TP over all GPUs, which then form one group. rows: decode rows of one step over all
    GPUs. overlap: two micro-batches hide part of the all-to-all (DeepSeek-V3 report section 3.4.2).
    draft: as in AfdShape.
    """

    accelerator: Accelerator
    gpus: int
    tp: int
    ep: int
    rows: float
    context: float
    precision: Precision = field(default_factory=Precision)
    routing: Routing = EVEN
    overlap: bool = False
    draft: int = 0

    def __post_init__(self) -> None:
        if min(self.gpus, self.tp, self.ep) < 1 or self.gpus % self.tp or self.gpus % self.ep:
            raise ConfigError(
                f"{self.gpus} GPUs cannot run TP {self.tp} with EP {self.ep}; both must divide it"
            )
        if self.ep == 1 and self.tp != self.gpus:
            raise ConfigError(
                f"EP 1 splits experts over all {self.gpus} GPUs, which then are one TP group, not "
                f"TP {self.tp}; use TP {self.gpus}, or an EP above 1"
            )

    @property
    def dp(self) -> int:
        return self.gpus // self.tp

    @property
    def price_per_hour(self) -> float:
        return self.gpus * self.accelerator.price_per_hour
