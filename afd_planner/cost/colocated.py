"""Cost of colocated serving: attention under DP or TP, experts under EP or TP, same GPUs."""

from dataclasses import dataclass

from afd_planner.cost.disaggregated import collective_s, rest_seconds
from afd_planner.cost.kernels import attention_fixed_s, kernel_attention, kernel_ffn
from afd_planner.cost.shape import EVEN_ROUTING, ColocatedShape, Efficiency
from afd_planner.cost.stages import StageTime
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.model import LayerGroup, ModelSpec
from afd_planner.facts.precision import dtype_bytes, wire_bytes


@dataclass(frozen=True)
class ColocatedLayer:
    """Times of one micro-batch in each of ``layers``.

    ``exchange_s``: seconds of the all-to-all, dispatch and combine together; 0 without EP.
    """

    layers: tuple[int, ...]
    compute: StageTime
    exchange_s: float


@dataclass(frozen=True)
class ColocatedStep:
    """Times of a colocated decode step.

    Attributes:
        layers: Times of one micro-batch of rows / micro_batches rows.
        rest_s: Seconds of the step outside the layers.
        host_s: Seconds that the host needs for a step, at the same time.
        micro_batches: 2 with overlap, else 1.
        hidden_exchange: Share of the exchange hidden behind the other micro-batch's arithmetic.
    """

    layers: tuple[ColocatedLayer, ...]
    rest_s: float
    host_s: float
    micro_batches: int
    hidden_exchange: float

    @property
    def seconds(self) -> float:
        """Step time, the TPOT without speculation. At least all arithmetic and all exchange."""
        return max(self.layers_s + self.rest_s, self.host_s)

    @property
    def layers_s(self) -> float:
        return sum(len(layer.layers) * self._period(layer) for layer in self.layers)

    def _period(self, layer: ColocatedLayer) -> float:
        compute, exchange = layer.compute.seconds, layer.exchange_s
        if self.micro_batches == 1:
            return compute + exchange
        exposed = compute + exchange * (1 - self.hidden_exchange)
        return self.micro_batches * max(exposed, exchange)


def colocated_step(
    model: ModelSpec, shape: ColocatedShape, efficiency: Efficiency
) -> ColocatedStep:
    """Returns the times of one decode step of ``shape``."""
    micro_batches = 2 if shape.overlap else 1
    rows = shape.rows / micro_batches  # of one micro-batch
    layers = tuple(_layer(group, shape, rows, efficiency) for group in model.groups)
    rest = rest_seconds(
        model,
        shape.accelerator,
        shape.rows * (1 + shape.draft) / shape.dp,
        shape.precision,
        shape.tp,
        efficiency,
    )
    host = efficiency.host_seconds(shape.rows / shape.dp)
    return ColocatedStep(layers, rest, host, micro_batches, efficiency.hidden_exchange)


def exchange_seconds(
    shape: ColocatedShape, tokens: float, ffn: MoeFfn, efficiency: Efficiency
) -> float:
    """Returns the seconds of dispatch and combine of one layer; 0 without EP.

    Copies of a token for GPUs of the same server use the server's links, all others the NIC, both
    at the same time. ``crossings`` gives the number of copies.
    """
    if shape.ep == 1 or shape.gpus == 1:
        return 0.0
    out, back = wire_bytes(shape.precision, ffn.hidden, 0)
    sent = tokens / shape.gpus * crossings(shape, ffn) * (out + back)
    local = min(shape.accelerator.gpus_per_server, shape.gpus)
    inside = sent * (local - 1) / shape.gpus
    outside = sent * (shape.gpus - local) / shape.gpus
    seconds = max(
        inside / (shape.accelerator.scale_up_bandwidth * efficiency.scale_up),
        outside / (shape.accelerator.nic_bandwidth * efficiency.network),
    )
    return seconds + 2 * efficiency.wire_latency_s


def crossings(shape: ColocatedShape, ffn: MoeFfn) -> float:
    """Returns the copies of a token that leave its GPU per layer, including expert imbalance.

    If an expert shard is one GPU, there is one copy per chosen expert, as in DeepEP's low-latency
    kernels. If a shard is several GPUs, they gather the token and sum its experts, so there is one
    copy per distinct shard.
    """
    if shape.ep == shape.gpus:
        return ffn.top_k * shape.routing.imbalance
    return shape.ep * (1 - (1 - 1 / shape.ep) ** ffn.top_k) * shape.routing.imbalance


def _shard_link(shape: ColocatedShape, tokens: float, ffn: MoeFfn, efficiency: Efficiency) -> float:
    """Returns the exposed seconds of all-gather and reduce-scatter inside an expert shard.

    Only another micro-batch's arithmetic can hide them. Without overlap they are fully exposed.
    """
    gpus = shape.gpus // shape.ep
    rows = tokens * crossings(shape, ffn) / shape.ep
    nbytes = (rows * each for each in wire_bytes(shape.precision, ffn.hidden, 0))
    link = sum(collective_s(part, gpus, shape.accelerator, efficiency) for part in nbytes)
    return link * (1 - efficiency.hidden_collectives) if shape.overlap else link


def _layer(
    group: LayerGroup, shape: ColocatedShape, rows: float, efficiency: Efficiency
) -> ColocatedLayer:
    accelerator, precision, queries = shape.accelerator, shape.precision, 1 + shape.draft
    own = rows / shape.dp
    attention = kernel_attention(
        group, accelerator, own, shape.context, precision, shape.tp, efficiency, queries
    )
    exchange = link = 0.0
    if isinstance(group.ffn, MoeFfn):
        tokens, shards, tp, routing = (
            rows * queries,
            shape.ep,
            shape.gpus // shape.ep,
            shape.routing,
        )
        exchange = exchange_seconds(shape, tokens, group.ffn, efficiency)
        if exchange:
            link = _shard_link(shape, tokens, group.ffn, efficiency)
    else:
        tokens, shards, tp, routing = own * queries, 1, shape.tp, EVEN_ROUTING
    mlp, fixed = kernel_ffn(
        group.ffn, accelerator, tokens, precision, shards, tp, efficiency, routing
    )
    # One all-reduce after attention, and one after an FFN under TP.
    reduces = 1 if exchange else 2
    nbytes = own * queries * group.ffn.hidden * dtype_bytes(precision.activations)
    link += 2 * reduces * collective_s(nbytes, shape.tp, accelerator, efficiency)
    fixed += attention_fixed_s(group, accelerator, precision, efficiency, handed_over=False)
    return ColocatedLayer(group.layers, StageTime((*attention, mlp), link, fixed), exchange)
