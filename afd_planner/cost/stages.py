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
        turn_s: Seconds between two micro-batches of the busiest resource: it sees the next message
            and starts.
    """

    layers: tuple[int, ...]
    attention: StageTime
    ffn: StageTime | None
    to_ffn: float
    to_attention: float
    turn_s: float = 0.0

    @property
    def busiest_s(self) -> float:
        """Seconds that the busiest resource takes for a micro-batch, with its turn. Not for a
        layer without remote FFN."""
        assert self.ffn is not None
        stages = self.attention.seconds, self.ffn.seconds, self.to_ffn, self.to_attention
        return max(stages) + self.turn_s

    @property
    def trip_s(self) -> float:
        """Seconds of the round trip of a micro-batch. Not for a layer without remote FFN."""
        assert self.ffn is not None
        return self.attention.seconds + self.to_ffn + self.ffn.seconds + self.to_attention


@dataclass(frozen=True)
class AfdStages:
    """All stages of one decode step of an xAyF deployment.

    ``groups`` partition the model's layers. ``rest_s`` is the time per step outside the layers:
    embedding, LM head, sampling and scheduling. ``host_s`` is what the host needs for a step, at
    the same time.
    """

    groups: tuple[LayerStages, ...]
    rest_s: float
    host_s: float = 0.0


def layer_period(stages: LayerStages, depth: int) -> float:
    """Returns the seconds from one layer to the next with ``depth`` micro-batches in flight.

    Two bounds apply, and the longer one counts. Each resource (attention pool, FFN pool, each
    direction of the wire) handles all micro-batches of a layer. And a micro-batch starts its next
    layer only after its round trip; at depth 3 with attention as the slowest stage, the round trip
    is hidden if 2 t_attention >= t_ffn + t_wire.
    """
    if stages.ffn is None:
        return depth * stages.attention.seconds
    return max(depth * stages.busiest_s, stages.trip_s)


def fill_seconds(stages: LayerStages, depth: int) -> float:
    """Returns the seconds of a step in which its pipeline fills and drains.

    The busiest resource waits for the first micro-batch, and the last one returns behind it. With
    it, a step of equal layers takes what :mod:`afd_planner.simulate.closed_form` says.
    """
    if stages.ffn is None:
        return 0.0
    return stages.trip_s + (depth - 1) * stages.busiest_s - layer_period(stages, depth)


def step_seconds(stages: AfdStages, depth: int) -> float:
    """Returns the seconds of one decode step, the TPOT without speculation.

    The formula is exact for equal layers. ``afd_planner.simulate`` covers jitter, unequal layers
    and imbalance, but not the host.
    """
    return max(layers_seconds(stages, depth) + stages.rest_s, stages.host_s)


def layers_seconds(stages: AfdStages, depth: int) -> float:
    """Returns the seconds of all layers of a step."""
    layers = sum(len(group.layers) * layer_period(group, depth) for group in stages.groups)
    fill = max((fill_seconds(group, depth) for group in stages.groups), default=0.0)
    return layers + max(0.0, fill)
