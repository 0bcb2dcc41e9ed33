"""What a deployment file and the checkpoint it names come to: model, contract, slots. No torch."""

from dataclasses import dataclass
from typing import TypedDict

from afd.checkpoint import fingerprint
from afd.config import Deployment
from afd.control.messages import Contract
from afd.dispatch import Dispatch, cheaper_dispatch
from afd.errors import ConfigError
from afd.models import Family, MoeModel, read_model
from afd.placement import Placement, contiguous, load_placement, slot_bounds
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
    """Whether decode steps are replayed as graphs."""
    on_gpu = deployment.attention.device != "cpu"
    return deployment.pipeline.graphs and on_gpu


@dataclass(frozen=True)
class Resolved:
    """Everything both sides of the wire must agree on before the first message.

    model: shape of the checkpoint, its ``dtype`` being the serving dtype ("bfloat16", ...).
    a2f / f2a: slot layouts towards and from the FFN.
    dispatch: to which FFN instances a row is sent. shared_by_rows: whether a row's shared experts
    are computed by one instance, which holds them whole, or by all, a slice each.
    placement: the experts of every instance when the deployment starts.
    """

    deployment: Deployment
    family: Family
    model: MoeModel
    slots: SlotMap
    a2f: SlotLayout
    f2a: SlotLayout
    dispatch: Dispatch
    shared_by_rows: bool
    placement: Placement
    contract: Contract


def resolve(deployment: Deployment) -> Resolved:
    """Read the checkpoint's config and headers (no weights) and derive the deployment's facts.

    Raises:
        ConfigError: the checkpoint cannot be served, or not split as the deployment asks.
    """
    family, model = read_model(deployment.model)
    model = family.serve_as(model, deployment.attention.dtype)
    dtype = model.dtype
    placement = _placement(deployment, model)
    dispatch = _dispatch(deployment, model)
    by_rows = _shared_by_rows(deployment, dispatch)
    capacity = deployment.attention.max_num_batched_tokens
    depth = deployment.pipeline.max_depth
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
        dispatch=dispatch,
        shared_experts="rows" if by_rows else "slices",
        expert_slots=placement.bounds,
        expert_map=placement.tables,
        movable=not replays(deployment),
    )
    slots = SlotMap(deployment.attention.instances, deployment.ffn.ranks, depth)
    return Resolved(
        deployment, family, model, slots, a2f, f2a, dispatch, by_rows, placement, contract
    )


def check_experts(deployment: Deployment, model: MoeModel) -> None:
    """Whether the FFN instances can hold the experts as asked; raises ConfigError."""
    _placement(deployment, model)
    _shared_by_rows(deployment, _dispatch(deployment, model))


def _placement(deployment: Deployment, model: MoeModel) -> Placement:
    ffn, layers = deployment.ffn, len(model.moe_layers)
    bounds = slot_bounds(model.num_experts, ffn.instances, ffn.redundant_experts)
    if ffn.placement is None:
        return contiguous(model.num_experts, bounds, layers)
    return load_placement(ffn.placement, model.num_experts, bounds, layers)


def _dispatch(deployment: Deployment, model: MoeModel) -> Dispatch:
    wanted = deployment.wire.dispatch
    if wanted == "routed" and replays(deployment):
        raise ConfigError(
            "wire.dispatch routed sends each FFN instance as many rows as their experts say, and a"
            " captured graph has fixed sizes; use broadcast, or set pipeline.graphs: false"
        )
    if wanted != "auto":
        return wanted
    if replays(deployment) or deployment.ffn.instances == 1:
        return "broadcast"
    ranges = expert_ranges(model.num_experts, deployment.ffn.instances)
    return cheaper_dispatch([end - start for start, end in ranges], model.top_k)


def _shared_by_rows(deployment: Deployment, dispatch: Dispatch) -> bool:
    wanted = deployment.ffn.shared_experts
    if wanted == "slices" and dispatch == "routed":
        raise ConfigError(
            "ffn.shared_experts slices needs every row on every FFN instance, but wire.dispatch is"
            " routed; use ffn.shared_experts rows, or wire.dispatch broadcast"
        )
    if wanted == "rows" and replays(deployment):
        raise ConfigError(
            "ffn.shared_experts rows computes as many rows as their experts say, and a captured"
            " graph has fixed sizes; use slices, or set pipeline.graphs: false"
        )
    return dispatch == "routed" if wanted == "auto" else wanted == "rows"
