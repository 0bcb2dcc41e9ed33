"""Stage times of a decode step, as the cost model and measurements provide them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One roofline in a stage: seconds of arithmetic and of memory traffic; the longer counts."""

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
    """One stage of one layer for one micro-batch, on one GPU of its pool.

    Attributes:
        parts: Rooflines that run one after the other.
        link_s: Exposed seconds of collectives inside the server.
        overhead_s: Fixed seconds (kernel launches, synchronisation).
        measured: Whether the time was measured. Then ``parts`` holds one part with that time.
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
        """The largest contribution: ``compute``, ``memory``, ``link`` or ``overhead``."""
        shares = {"compute": 0.0, "memory": 0.0, "link": self.link_s, "overhead": self.overhead_s}
        for part in self.parts:
            shares[part.bound] += part.seconds
        return max(shares, key=lambda name: shares[name])


@dataclass(frozen=True)
class LayerStages:
    """Stages of one micro-batch in each of ``layers``.

    Attributes:
        ffn: None if the layer's FFN runs in the attention pool. ``attention`` then includes it and
            both wire times are 0.
        to_ffn, to_attention: Seconds on the wire per direction. Both directions run at the same
            time (full duplex).
    """

    layers: tuple[int, ...]
    attention: StageTime
    ffn: StageTime | None
    to_ffn: float
    to_attention: float


@dataclass(frozen=True)
class AfdStages:
    """All stages of one decode step of an xAyF deployment.

    ``groups`` partition the model's layers. ``rest_s`` is the time per step outside the layers:
    embedding, LM head, sampling and scheduling.
    """

    groups: tuple[LayerStages, ...]
    rest_s: float


def layer_period(stages: LayerStages, depth: int) -> float:
    """Returns the seconds from one layer to the next with ``depth`` micro-batches in flight.

    Two bounds apply, and the longer one counts. Each resource (attention pool, FFN pool, each
    direction of the wire) handles all micro-batches of a layer. And a micro-batch starts its next
    layer only after its round trip; at depth 3 with attention as the slowest stage, the round trip
    is hidden if 2 t_attention >= t_ffn + t_wire.
    """
    attention = stages.attention.seconds
    if stages.ffn is None:
        return depth * attention
    ffn = stages.ffn.seconds
    busiest = max(attention, ffn, stages.to_ffn, stages.to_attention)
    return max(depth * busiest, attention + stages.to_ffn + ffn + stages.to_attention)


def step_seconds(stages: AfdStages, depth: int) -> float:
    """Returns the seconds of one decode step, the TPOT without speculation.

    The formula is exact for equal layers in steady state. ``afd_planner.simulate`` covers jitter,
    unequal layers and imbalance.
    """
    layers = sum(len(group.layers) * layer_period(group, depth) for group in stages.groups)
    return layers + stages.rest_s
