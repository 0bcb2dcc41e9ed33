"""What a deployment file and the checkpoint it names come to: model, contract, slots. No torch."""

from dataclasses import dataclass
from typing import TypedDict

from afd.checkpoint import fingerprint
from afd.config import Deployment
from afd.control.messages import Contract
from afd.models import Family, MoeModel, read_model
from afd.topology import SlotMap, expert_ranges
from afd.wire.layout import SlotLayout, layouts


class RegionOptions(TypedDict):
    """Keyword arguments of ``afd_comm.Region`` that depend on the deployment."""

    device: str
    tcp_host: str | None


def region_options(deployment: Deployment, device: str) -> RegionOptions:
    """Where an instance on ``device`` ("cpu", "cuda") keeps its slots, and who may reach them.

    A GPU role sees its own GPU as device 0 (:func:`afd.topology.gpu_order`).
    """
    if device != "cpu":
        return {"device": f"{device}:0", "tcp_host": None}
    return {"device": "cpu", "tcp_host": deployment.transport.tcp_host}


def replays(deployment: Deployment) -> bool:
    """Whether decode steps are replayed as graphs.

    Not with wire.format mxfp4, whose codec copies its tables to the device at each call, which a
    capture forbids.
    """
    on_gpu = deployment.attention.device != "cpu"
    capturable = deployment.wire.format != "mxfp4"
    return deployment.pipeline.graphs and on_gpu and capturable


@dataclass(frozen=True)
class Resolved:
    """Everything both sides of the wire must agree on before the first message.

    model: shape of the checkpoint, its ``dtype`` being the serving dtype ("bfloat16", ...).
    a2f / f2a: slot layouts towards and from the FFN.
    """

    deployment: Deployment
    family: Family
    model: MoeModel
    slots: SlotMap
    a2f: SlotLayout
    f2a: SlotLayout
    contract: Contract


def resolve(deployment: Deployment) -> Resolved:
    """Read the checkpoint's config and headers (no weights) and derive the deployment's facts.

    Raises:
        ConfigError: the checkpoint cannot be served, or not split as the deployment asks.
    """
    family, model = read_model(deployment.model)
    model = family.serve_as(model, deployment.attention.dtype)
    dtype = model.dtype
    experts = expert_ranges(model.num_experts, deployment.ffn.instances)
    capacity = deployment.attention.max_num_batched_tokens
    depth = deployment.pipeline.depth
    wire = deployment.wire
    a2f, f2a = layouts(wire.format, dtype, capacity, model.hidden, model.top_k, wire.fp8)
    contract = Contract(
        model_hash=fingerprint(deployment.model),
        dtype=dtype,
        wire=wire.name,
        hidden=model.hidden,
        num_layers=model.num_layers,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        capacity_rows=capacity,
        max_depth=depth,
        attention_instances=deployment.attention.instances,
        ffn_instances=deployment.ffn.instances,
        ffn_tp=deployment.ffn.tp,
        reduce=deployment.ffn.reduce,
        expert_map=experts,
    )
    slots = SlotMap(deployment.attention.instances, deployment.ffn.ranks, depth)
    return Resolved(deployment, family, model, slots, a2f, f2a, contract)
