"""Times of the stages of a decode step: what cost model, measurements and simulator exchange."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One roofline inside a stage: the slower of arithmetic and memory, seconds."""

    name: str
    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> str:
        return "compute" if self.compute_s >= self.memory_s else "memory"


@dataclass(frozen=True)
class StageTime:
    """One stage of one layer for one micro-batch, on one GPU of its pool (all GPUs are alike).

    parts follow one another; link_s is the exposed time of collectives inside the server;
    overhead_s is fixed (kernel launches, synchronisation). measured: taken from a measurement
    instead of the roofline; then ``parts`` holds one part with the measured time.
    """

    parts: tuple[Part, ...]
    link_s: float = 0.0
    overhead_s: float = 0.0
    measured: bool = False

    @property
    def seconds(self) -> float:
        return sum(part.seconds for part in self.parts) + self.link_s + self.overhead_s

    @property
    def bound(self) -> str:
        """What takes most of the time: ``compute``, ``memory``, ``link`` or ``overhead``."""
        shares = {"compute": 0.0, "memory": 0.0, "link": self.link_s, "overhead": self.overhead_s}
        for part in self.parts:
            shares[part.bound] += part.seconds
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True)
class LayerStages:
    """Stages of one micro-batch in each of ``layers``. Seconds.

    ffn is None where the whole layer runs in the attention pool (its FFN is then part of
    ``attention``, and both wire times are 0). to_ffn and to_attention are the two directions of the
    wire, which run at the same time on a full-duplex network.
    """

    layers: tuple[int, ...]
    attention: StageTime
    ffn: StageTime | None
    to_ffn: float
    to_attention: float


@dataclass(frozen=True)
class AfdStages:
    """All stages of one decode step of an xAyF deployment.

    groups partition the model's layers. rest_s: per step, outside the layers: embedding, LM head,
    sampling and scheduling, seconds.
    """

    groups: tuple[LayerStages, ...]
    rest_s: float


def layer_period(stages: LayerStages, depth: int) -> float:
    """Seconds from one layer to the next with ``depth`` micro-batches in flight.

    Each resource (attention pool, FFN pool, each direction of the wire) handles all micro-batches
    of a layer, and no micro-batch starts its next layer before it has been around once: the longest
    of these binds. With depth 3 the second condition is 2 t_a >= t_f + t_c of the design.
    """
    attention = stages.attention.seconds
    if stages.ffn is None:
        return depth * attention
    ffn = stages.ffn.seconds
    busiest = max(attention, ffn, stages.to_ffn, stages.to_attention)
    return max(depth * busiest, attention + stages.to_ffn + ffn + stages.to_attention)


def step_seconds(stages: AfdStages, depth: int) -> float:
    """Time of one decode step (TPOT without speculation), seconds, in closed form.

    Exact for equal layers in steady state; ``afd.planner.simulate`` covers jitter, unequal layers
    and imbalance.
    """
    layers = sum(len(group.layers) * layer_period(group, depth) for group in stages.groups)
    return layers + stages.rest_s
