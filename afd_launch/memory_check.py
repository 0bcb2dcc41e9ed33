"""Whether the GPUs of a deployment file hold what `afd serve` puts on them. Reads no weights."""

from __future__ import annotations

from collections.abc import Iterator

from afd.config.deployment import Deployment
from afd.config.hosts import Host
from afd.config.resolve import wire_fp8
from afd.config.roles import gpu_processes
from afd.devices import device_named
from afd.errors import ConfigError
from afd.models import read_model
from afd.schedule import row_shares
from afd.topology import SlotMap
from afd.wire.layout import layouts
from afd_planner.cost.served import USABLE, Buffers, GpuUse, attention_weights, ffn_weights
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import load_model
from afd_planner.facts.precision import dtype_bytes

_STORED = {"fp8_block": "fp8", "mxfp4": "mxfp4"}
_REMEDIES = {
    "attention": "lower attention.kv_cache_gib or attention.max_num_batched_tokens",
    "ffn": "set ffn.weights to fp8_block or mxfp4, use more ffn.instances or ranks, or lower"
    " attention.max_num_batched_tokens",
}


def gpu_uses(deployment: Deployment, model: ModelSpec) -> dict[str, GpuUse]:
    """Returns what is on one GPU of each pool: "attention", "ffn"; bytes."""
    family, checkpoint = read_model(deployment.model)
    dtype = family.serve_as(checkpoint, deployment.attention.dtype).dtype
    attention, ffn, wire = deployment.attention, deployment.ffn, deployment.wire
    a2f, f2a = layouts(
        wire.format,
        dtype,
        row_shares(attention.max_num_batched_tokens, attention.tp)[0][1],
        checkpoint.hidden,
        checkpoint.top_k,
        wire_fp8(deployment),
    )
    slots = SlotMap(attention.ranks, ffn.ranks, deployment.pipeline.max_depth)
    buffers = Buffers(slots, a2f.nbytes, f2a.nbytes, copied=len(deployment.hosts) > 1)
    experts = dtype
    if ffn.weights == "auto":
        experts = model.dtype if model.dtype in _STORED.values() else dtype
    elif ffn.weights != "plain":
        experts = _STORED[ffn.weights]
    held = ffn_weights(model, dtype_bytes(experts), ffn.instances, ffn.tp, ffn.redundant_experts)
    whole = attention_weights(model, dtype_bytes(dtype)) / attention.tp
    cache = attention.kv_cache_gib * 2**30 / attention.tp
    return {
        "attention": GpuUse("attention", whole, cache, buffers.attention),
        "ffn": GpuUse("ffn", held, 0.0, buffers.ffn),
    }


def check_memory(deployment: Deployment) -> str:
    """Returns what each kind of GPU holds, as a note that begins with "; "; "" on CPUs.

    Raises:
        ConfigError: a GPU is too small; it names the host, the parts and what to change.
    """
    devices = deployment.attention.device, deployment.ffn.device
    if all(device_named(device).host_memory for device in devices):
        return ""
    kinds = [host for host in deployment.hosts if host.accelerators and host.accelerators.kind]
    if not kinds or deployment.gpus is not None:
        return "; memory not checked: it needs hosts with accelerators.kind"
    uses = gpu_uses(deployment, load_model(str(deployment.model)))
    notes: dict[str, None] = {}
    for host in kinds:
        notes |= dict.fromkeys(_checked(deployment, host, uses))
    return "; memory per GPU: " + ", ".join(notes)


def _checked(deployment: Deployment, host: Host, uses: dict[str, GpuUse]) -> Iterator[str]:
    assert host.accelerators is not None and host.accelerators.kind is not None
    kind = load_accelerator(host.accelerators.kind)
    usable = USABLE * kind.memory_bytes
    for pool in sorted({role for role, _, _ in gpu_processes(deployment, host.name)}):
        use = uses[pool]
        if not use.fits(kind.memory_bytes):
            cache = f", KV cache {use.cache / 2**30:.1f}" if use.cache else ""
            raise ConfigError(
                f"host {host.name}: {pool} needs {use.total / 2**30:.1f} GiB on each {kind.name}"
                f" (weights {use.weights / 2**30:.1f}{cache}, slots {use.buffers / 2**30:.1f}), but"
                f" {usable / 2**30:.1f} GiB are usable; {_REMEDIES[pool]}"
            )
        yield f"{pool} {use.total / 2**30:.1f} of {usable / 2**30:.1f} GiB ({kind.name})"
