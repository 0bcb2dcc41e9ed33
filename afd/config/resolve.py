"""Derives model, contract and slots from a deployment file and its checkpoint. No torch."""

from dataclasses import dataclass, replace
from typing import TypedDict

from afd.config.contract import Contract
from afd.config.deployment import Deployment
from afd.config.fp8 import DEFAULT as FP8_DEFAULT
from afd.config.fp8 import fp8_of
from afd.devices import device_named
from afd.devices.rocm import FP8_OF_ARCH
from afd.errors import ConfigError
from afd.graph_sizes import GraphSizes, captured_rows
from afd.models import Family, MoeModel, fields, read_config, read_model
from afd.models.checkpoint import fingerprint
from afd.placement.dispatch import Dispatch, cheaper_dispatch
from afd.placement.tables import (
    Placement,
    contiguous,
    holders,
    load_placement,
    slot_bounds,
    spread,
)
from afd.schedule import row_shares
from afd.topology import SlotMap, expert_ranges, width_slices
from afd.wire.layout import SlotLayout, layouts


class RegionOptions(TypedDict):
    """The keyword arguments of ``afd_comm.Region`` that depend on the deployment."""

    device: str
    tcp_host: str | None


def region_options(deployment: Deployment, device: str) -> RegionOptions:
    """Returns the memory in which a role on ``device`` keeps its slots, and its TCP address.

    device: a name in :data:`afd.devices.DEVICES`.
    """
    tcp_host = deployment.transport.tcp_host
    return {"device": device_named(device).region_device, "tcp_host": tcp_host}


def replays(deployment: Deployment, family: Family) -> bool:
    """Whether decode steps are captured as graphs and replayed.

    Steps of a split model are not, nor those of a pool whose other side is on CPUs: a CPU cannot
    wait for a doorbell with a deadline and compute at the same time. Nor are those of attention
    ranks that gather: if an FFN rank is lost in a replay, they would have to agree to repeat it.
    """
    sides = (deployment.attention.device, deployment.ffn.device)
    captures = all(device_named(side).captures_graphs for side in sides)
    alone = deployment.attention.tp == 1
    return deployment.pipeline.graphs and captures and alone and not family.split


def max_depth(deployment: Deployment, family: Family) -> int:
    """Returns the largest number of micro-batches of a step. A split model has one."""
    return 1 if family.split else deployment.pipeline.max_depth


def wire_fp8(deployment: Deployment) -> str:
    """Returns the FP8 type of the wire. Raises ConfigError if only the FFN instances know it."""
    wire, ffn = deployment.wire, deployment.ffn
    if wire.format == "exact":
        return FP8_DEFAULT
    fp8 = fp8_of(ffn.device, ffn.arch, wire.fp8)
    if fp8 is None:
        raise ConfigError(
            f"wire.format {wire.format} on device {ffn.device} depends on the GPUs of the FFN"
            f" instances, and this host has none; set ffn.arch to {' or '.join(FP8_OF_ARCH)}"
        )
    return fp8


def wire_name(wire: str, fp8: str) -> str:
    """Format and FP8 type, as the contract states them: "exact", "fp8", "mxfp4 e4m3fnuz"."""
    return wire if wire == "exact" or fp8 == FP8_DEFAULT else f"{wire} {fp8}"


@dataclass(frozen=True)
class Resolved:
    """Everything that attention and FFN members must agree on before the first message.

    model: shape of the checkpoint; its ``dtype`` is the serving dtype ("bfloat16", ...).
    a2f, f2a: slot layouts of messages to the FFN and from it.
    dispatch: to which FFN instances a row is sent.
    shared_by_rows: True: one instance computes all shared experts of a row. False: every instance
        computes a slice of them.
    placement: the experts of every FFN instance at the start.
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
    """Derives the facts of a deployment from the checkpoint's config.json and tensor headers.

    Reads no weights.

    Raises:
        ConfigError: the checkpoint cannot be served, or not with this deployment's topology.
    """
    family, model = _model(deployment)
    model = family.serve_as(model, deployment.attention.dtype)
    dtype = model.dtype
    placement = _placement(deployment, model)
    graphs = replays(deployment, family)
    dispatch = _dispatch(deployment, model, graphs)
    by_rows = _shared_by_rows(deployment, dispatch)
    attention = deployment.attention
    _, capacity = row_shares(attention.max_num_batched_tokens, attention.tp)[0]
    depth = max_depth(deployment, family)
    wire = deployment.wire
    fp8 = wire_fp8(deployment)
    a2f, f2a = layouts(wire.format, dtype, capacity, model.hidden, model.top_k, fp8)
    contract = Contract(
        model_hash=fingerprint(deployment.model),
        dtype=dtype,
        wire=wire_name(wire.format, fp8),
        hidden=model.hidden,
        num_layers=model.num_layers,
        moe_layers=model.moe_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        capacity_rows=capacity,
        max_depth=depth,
        attention_instances=attention.capacity,
        attention_tp=attention.tp,
        ffn_instances=deployment.ffn.capacity,
        ffn_tp=deployment.ffn.tp,
        elastic=deployment.ffn.max_instances is not None,
        reduce=deployment.ffn.reduce,
        dispatch=dispatch,
        shared_experts="rows" if by_rows else "slices",
        expert_slots=placement.bounds,
        expert_map=placement.tables,
        graph_buckets=_graph_buckets(deployment, family),
    )
    slots = SlotMap(attention.ranks, deployment.ffn.ranks, depth)
    return Resolved(
        deployment, family, model, slots, a2f, f2a, dispatch, by_rows, placement, contract
    )


def _graph_buckets(deployment: Deployment, family: Family) -> tuple[tuple[int, ...], ...]:
    pipeline, attention = deployment.pipeline, deployment.attention
    if not pipeline.graphs or family.split or attention.tp > 1:
        return ()
    rows = captured_rows(attention.max_num_seqs, attention.decode_rows)
    return GraphSizes.of(rows, pipeline.max_depth, pipeline.min_rows).buckets


def check_model(deployment: Deployment) -> None:
    """Checks that the checkpoint fits the deployment. Raises ConfigError."""
    if not (deployment.model / "config.json").is_file():
        what = "has no config.json" if deployment.model.is_dir() else "is not a folder"
        raise ConfigError(
            f"model {deployment.model} {what}; give the path of a Hugging Face checkpoint folder"
            " (config.json and *.safetensors), relative to the deployment file, or a name on the"
            " Hub after hf download NAME"
        )
    family, model = _model(deployment)
    if deployment.ffn.instances > model.num_experts:
        raise ConfigError(
            f"ffn.instances is {deployment.ffn.instances} but {deployment.model.name} has"
            f" {model.num_experts} experts per layer; use at most {model.num_experts} FFN instances"
        )
    _placement(deployment, model)
    graphs = replays(deployment, family)
    _shared_by_rows(deployment, _dispatch(deployment, model, graphs))
    width_slices(model.moe_intermediate, deployment.ffn.tp)


def _model(deployment: Deployment) -> tuple[Family, MoeModel]:
    """Returns the checkpoint's model, with its draft layers if they are used."""
    family, model = read_model(deployment.model)
    _check_device(deployment, family, model)
    speculation = deployment.attention.speculation
    if speculation is not None and speculation.method == "eagle3" and not family.eagle3:
        raise ConfigError(
            f"{model.architecture} is not served with EAGLE-3 heads; set"
            " attention.speculation.method to ngram, or remove it"
        )
    if speculation is None or speculation.method != "mtp":
        return family, model
    # Qwen3-Next has one draft layer and does not say so (vLLM 0.26 models/qwen3_next_mtp.py).
    unsaid = int(bool(family.draft_prefix))
    config = {"num_nextn_predict_layers": unsaid, **read_config(deployment.model)}
    drafts = fields.integer(config, "num_nextn_predict_layers", minimum=0)
    if not drafts or not family.mtp[0]:
        why = "has no draft layers" if family.mtp[0] else "is not served with its draft layers"
        raise ConfigError(
            f"{model.architecture} {why}; set attention.speculation.method to ngram, or remove it"
        )
    layers = (*model.moe_layers, *range(model.num_layers, model.num_layers + drafts))
    return family, replace(model, moe_layers=layers)


def _check_device(deployment: Deployment, family: Family, model: MoeModel) -> None:
    """Raises ConfigError if the model's attention is sparse and this device cannot compute that."""
    attention = deployment.attention
    if not family.sparse or not device_named(attention.device).host_memory:
        return
    kept = fields.integer(read_config(deployment.model), family.sparse)
    if attention.max_model_len > kept:
        raise ConfigError(
            f"{model.architecture} attends to {kept} tokens ({family.sparse}), which vLLM computes "
            f"on GPUs only. On device {attention.device} all tokens take part, which is the same "
            f"up to {kept}; set attention.max_model_len to at most {kept}"
        )


def _placement(deployment: Deployment, model: MoeModel) -> Placement:
    ffn, layers = deployment.ffn, len(model.moe_layers)
    experts, spare = model.num_experts, ffn.redundant_experts
    bounds = slot_bounds(experts, ffn.instances, spare, ffn.max_instances)
    if ffn.placement is None and ffn.max_instances is None:
        return contiguous(experts, bounds, layers)
    if ffn.placement is None:
        return Placement(bounds, (spread(experts, bounds, range(ffn.instances), spare),) * layers)
    found = load_placement(ffn.placement, experts, bounds, layers)
    absent = [j for j in holders(found.tables, bounds) if j >= ffn.instances]
    if absent:
        raise ConfigError(
            f"ffn.placement {ffn.placement} has experts on instance {absent[0]}, but ffn.instances"
            f" is {ffn.instances}; raise it, or make a new file with `afd placement`"
        )
    return found


def _dispatch(deployment: Deployment, model: MoeModel, graphs: bool) -> Dispatch:
    wanted = deployment.wire.dispatch
    if wanted != "auto":
        return wanted
    if deployment.ffn.capacity == 1 or (graphs and _sends_whole_buffers(deployment)):
        return "broadcast"
    ranges = expert_ranges(model.num_experts, deployment.ffn.instances)
    return cheaper_dispatch([end - start for start, end in ranges], model.top_k)


def _sends_whole_buffers(deployment: Deployment) -> bool:
    """Whether replayed steps copy whole buffers, so that routed dispatch saves no bytes: backend
    ipc does, which ``auto`` takes on one host."""
    backend = deployment.transport.backend
    return backend == "ipc" or (backend == "auto" and len(deployment.hosts) < 2)


def _shared_by_rows(deployment: Deployment, dispatch: Dispatch) -> bool:
    wanted = deployment.ffn.shared_experts
    if wanted == "slices" and dispatch == "routed":
        raise ConfigError(
            "ffn.shared_experts slices needs every row on every FFN instance, but wire.dispatch is"
            " routed; use ffn.shared_experts rows or wire.dispatch broadcast"
        )
    rows = dispatch == "routed" or deployment.ffn.max_instances is not None
    return rows if wanted == "auto" else wanted == "rows"
