"""`afd serve FILE --check`: would this deployment start on this host? Starts nothing.

Reads config.json and the headers of the weight files, asks the FFN side which backend it would
select and vLLM's parser about ``attention.vllm_args``, and compares memory with what this host
has. What can be said from the file alone is checked before (``load_deployment``), also by
``--check-file``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import psutil

from afd.config.deployment import Deployment
from afd.config.resolve import Resolved, resolve
from afd.config.roles import RoleSpec, gpu_processes
from afd.devices import device_named
from afd.errors import AfdError
from afd.metrics.otlp import VLLM_PACKAGES, check_packages
from afd.models import read_model, read_quantization
from afd.models.checkpoint import tensor_table
from afd.topology import gpu_order, rank_number
from afd_launch.doctor import Finding, vllm_version
from afd_launch.installation import find_gpus, vllm_build, vllm_remedy
from afd_launch.tensor_shapes import odd_tensor
from afd_planner.cost.served import USABLE, Buffers, GpuUse
from afd_planner.facts.model_hf import load_model

GIB = 2**30
_PROCESS_GIB = {"attention": 1.6, "ffn": 0.5}
_RANK_GIB = 0.7  # of each worker, if an attention instance has several
"""Of a process without cache and weights, on CPUs (docs/architecture.md, "Memory on CPUs")."""


def findings(deployment: Deployment) -> Iterator[Finding]:
    """Yields one line per question, the bad ones included."""
    for check in (_keys, _vllm, _devices, _arguments, _settings, _traces):
        yield from _guarded(check, deployment)
    if not any(deployment.model.glob("*.safetensors")):
        yield Finding(
            "bad",
            "weights",
            f"{deployment.model} has no *.safetensors files; finish the download, or serve another "
            "checkpoint with --set model=/path/to/it",
        )
        return
    weights = list(_guarded(_weights, deployment))
    yield from weights
    if any(found.level == "bad" for found in weights):
        return  # the others would say the same
    yield from _guarded(_cache, deployment)
    if vllm_build() is not None:  # it brings torch
        yield from _guarded(_attention, deployment)
        yield from _guarded(_experts, deployment)


Check = Callable[[Deployment], Iterator[Finding]]


def _guarded(check: Check, deployment: Deployment) -> Iterator[Finding]:
    try:
        yield from check(deployment)
    except AfdError as error:
        yield Finding("bad", check.__name__.removeprefix("_"), str(error))


def _keys(deployment: Deployment) -> Iterator[Finding]:
    keys = deployment.control.keys
    if keys is not None and not keys.is_file():
        text = f"control.keys {keys} does not exist; copy it here, or make it: afd keys {keys}"
        yield Finding("bad", "keys", text)


def _vllm(deployment: Deployment) -> Iterator[Finding]:
    build = vllm_build()
    if build is None:
        yield Finding("bad", "vllm", f"not installed; {vllm_remedy(find_gpus())}")
        return
    wanted = deployment.attention.device
    good = build == wanted  # builds have the names of devices
    text = f"built for {build}, attention.device is {wanted}"
    yield Finding("ok" if good else "bad", "vllm", text if good else f"{text}; install the other")
    version = vllm_version()
    if version is not None:
        yield version


def _traces(deployment: Deployment) -> Iterator[Finding]:
    if deployment.metrics.otlp is not None:
        check_packages(VLLM_PACKAGES)
        yield Finding("ok", "traces", f"go to {deployment.metrics.otlp}")


def _devices(deployment: Deployment) -> Iterator[Finding]:
    attention, ffn = deployment.attention, deployment.ffn
    pools = (
        (device_named(attention.device), attention.ranks + deployment.prefill.colocated),
        (device_named(ffn.device), ffn.ranks),
    )
    on_gpus = [(device, count) for device, count in pools if not device.host_memory]
    if not on_gpus:
        return
    gpus, device = find_gpus(), on_gpus[0][0]
    processes = sum(count for _, count in on_gpus)
    needed = min(processes, deployment.gpus or processes)
    if len(deployment.hosts) > 1:
        needed = 1  # of this host; each host checks its own when it starts
    text = f"{gpus.count} of {gpus.kind} here, the deployment uses {needed}"
    if gpus.count == 0:
        text = f"device {device.name} but this host has no GPU; set attention.device and ffn.device"
        yield Finding("bad", "GPUs", f"{text} to cpu, or look: {device.listed_by}")
    elif gpus.count < needed:
        yield Finding("bad", "GPUs", f"{text}; use fewer instances, or gpus: {gpus.count}")
    else:
        yield Finding("ok", "GPUs", text)
    if attention.tp > 1 and deployment.pipeline.graphs:
        yield Finding(
            "note", "graphs", f"none: attention.tp is {attention.tp}, so steps run eagerly"
        )


def _arguments(deployment: Deployment) -> Iterator[Finding]:
    arguments = (*deployment.attention.vllm_args, *deployment.prefill.vllm_args)
    if not arguments:
        return
    if vllm_build() is None:
        yield Finding("note", "vllm_args", "not checked: vLLM is not installed")
        return
    from attention_worker.vllm_hooks.arguments import problem_with

    problem = problem_with(arguments)
    if problem is not None:
        yield Finding("bad", "vllm_args", f"{problem}; correct the vllm_args of the file")
    else:
        yield Finding("ok", "vllm_args", "vLLM's parser takes them")


def _settings(deployment: Deployment) -> Iterator[Finding]:
    """Whether vLLM can be configured as an attention instance here."""
    if vllm_build() != deployment.attention.device:
        return  # _vllm has said so
    from attention_worker.vllm_hooks.arguments import problem_with, refused

    if problem_with(deployment.attention.vllm_args) is not None:
        return  # _arguments has said so
    role = RoleSpec("attention", 0, deployment, control_address="")  # it is not started
    refusal = refused(role)
    if refusal is not None:
        text = f"vLLM refuses the configuration ({refusal}); correct the keys of attention"
        yield Finding("bad", "vllm settings", text)
    else:
        yield Finding("ok", "vllm settings", "vLLM takes the configuration")


def _weights(deployment: Deployment) -> Iterator[Finding]:
    table = tensor_table(deployment.model)
    files = len({info.file for info in table.values()})
    stored = sum(info.nbytes for info in table.values())
    found = read_quantization(deployment.model)
    yield Finding("ok", "weights", f"{found}; {len(table)} tensors, {files} files, {_size(stored)}")


def _cache(deployment: Deployment) -> Iterator[Finding]:
    """Whether the cache holds one request of the greatest length; else vLLM does not start."""
    attention = deployment.attention
    family, checkpoint = read_model(deployment.model)
    dtype = family.serve_as(checkpoint, attention.dtype).dtype
    if any("kv-cache-dtype" in argument for argument in attention.vllm_args):
        dtype = "fp8"  # the smallest that it can be
    model = load_model(str(deployment.model))
    need = model.kv_stored_bytes(attention.max_model_len, dtype)
    text = (
        f"one request of {attention.max_model_len} tokens takes {_size(need)} of "
        f"{_size(attention.kv_cache_gib * GIB)}"
    )
    if need > attention.kv_cache_gib * GIB:
        text += "; raise attention.kv_cache_gib or lower attention.max_model_len"
        yield Finding("bad", "cache", text)
    else:
        yield Finding("ok", "cache", text)


def _attention(deployment: Deployment) -> Iterator[Finding]:
    """What attention instances load, and what is decoded for them."""
    nbytes, decoded, formats = _attention_weights(deployment)
    family, model = read_model(deployment.model)
    odd = odd_tensor(tensor_table(deployment.model), family.is_expert_weight, model.hidden)
    if odd is not None:
        yield Finding("bad", "attention", odd)
        return
    if decoded:
        text = (
            f"{decoded} weights in {formats} are decoded at load, because the CPU has no kernel "
            f"for them; {_size(nbytes)} then"
        )
        yield Finding("note", "attention", text)
    else:
        yield Finding("ok", "attention", f"as stored, {_size(nbytes)}")


def _attention_weights(deployment: Deployment) -> tuple[int, int, str]:
    """Returns the bytes of an attention instance's weights as served, how many are decoded, and
    from which formats. Raises ConfigError if tensors to decode are missing or do not fit."""
    import torch

    from attention_worker.stored_weights import AttentionTensors

    decoding = device_named(deployment.attention.device).host_memory
    model = resolve(deployment).model
    dtype: torch.dtype = vars(torch)[model.dtype]
    tensors = AttentionTensors(deployment.model, decoding=decoding)
    nbytes = tensors.nbytes(dtype.itemsize)
    if model.draft_layers:
        drafts = AttentionTensors(deployment.model, decoding=decoding, drafts=True)
        nbytes += drafts.nbytes(dtype.itemsize)
    speculation = deployment.attention.speculation
    if speculation is not None and speculation.model is not None:
        nbytes += sum(file.stat().st_size for file in speculation.model.glob("*.safetensors"))
    return nbytes, tensors.decoded, tensors.formats


def _experts(deployment: Deployment) -> Iterator[Finding]:
    """Whether every FFN rank finds its tensors, what it would hold, and the memory of all."""
    # Imported here: torch takes seconds to import.
    import torch

    from ffn_worker.experts.loader import Checkpoint
    from ffn_worker.experts.plan import plan_load
    from ffn_worker.moe.batch_selection import mean_pairs

    resolved = resolve(deployment)
    rows = deployment.attention.max_num_seqs * deployment.attention.capacity
    kind = device_named(deployment.ffn.device).torch_type
    here = kind == "cpu" or torch.cuda.is_available()
    random = deployment.ffn.load == "dummy"
    checkpoint = None
    if not random:
        checkpoint = Checkpoint(deployment.model, resolved.family, resolved.model)
    plans = [
        plan_load(
            checkpoint,
            resolved.model,
            instances=deployment.ffn.capacity,
            index=index,
            tp=deployment.ffn.tp,
            rank=rank,
            placement=resolved.placement,
            shared_by_rows=resolved.shared_by_rows,
            backend=deployment.ffn.backend if here else "torch",
            weights=deployment.ffn.weights,
            device=torch.device(kind),
            pairs=mean_pairs(rows, resolved.model.top_k, resolved.model.num_experts),
        )
        for index in range(deployment.ffn.capacity)
        for rank in range(deployment.ffn.tp)
    ]
    for plan in plans if checkpoint is not None else ():
        plan.check()
    if not here:
        missing = deployment.ffn.device  # torch calls rocm cuda
        yield Finding("note", "experts", f"tensors are complete; kernels not checked: no {missing}")
        return
    largest = max(plans, key=lambda plan: plan.held_bytes)
    level = "ok" if largest.as_stored else "note"
    yield Finding(level, "experts", f"{largest.text} on the largest of {len(plans)} ranks")
    yield from _memory(resolved, [plan.held_bytes for plan in plans])


def _memory(resolved: Resolved, expert_bytes: Sequence[int]) -> Iterator[Finding]:
    deployment = resolved.deployment
    weights, _, _ = _attention_weights(deployment)
    tp, cache = deployment.attention.tp, deployment.attention.kv_cache_gib * GIB
    attention = GpuUse("attention", weights / tp, cache / tp, 0)  # of one rank
    on_host = [
        device_named(device).host_memory
        for device in (deployment.attention.device, deployment.ffn.device)
    ]
    if any(on_host):
        yield _host_memory(deployment, attention, expert_bytes)
    if not all(on_host):
        yield from _gpu_memory(resolved, attention, expert_bytes)


def _host_memory(deployment: Deployment, attention: GpuUse, expert_bytes: Sequence[int]) -> Finding:
    """Compares what is not on GPUs, on the fullest host, with this host's memory."""
    each, experts, tp = 0.0, [0.0] * len(expert_bytes), deployment.ffn.tp
    ranks = deployment.attention.tp
    if device_named(deployment.attention.device).host_memory:
        each = attention.total * ranks + _PROCESS_GIB["attention"] * GIB
        each += _RANK_GIB * GIB * ranks if ranks > 1 else 0
    if device_named(deployment.ffn.device).host_memory:
        experts = [size + _PROCESS_GIB["ffn"] * GIB for size in expert_bytes]
    need = max(
        len((*place.attention, *place.spare)) * each
        + sum(sum(experts[j * tp : (j + 1) * tp]) for j in (*place.ffn, *place.spare_ffn))
        for place in deployment.places()
    )
    if device_named(deployment.attention.device).host_memory:
        whole = _prefill_use(deployment, attention, expert_bytes).total
        need += deployment.prefill.colocated * (whole + _PROCESS_GIB["attention"] * GIB)
    total = psutil.virtual_memory().total
    text = f"{_size(need)} of this host's {_size(total)}"
    if need <= total:
        return Finding("ok", "memory", text)
    cache = attention.cache * ranks if each else 0.0
    return Finding("bad", "memory", f"{text}: {_largest(cache, sum(experts))}")


def _prefill_use(deployment: Deployment, attention: GpuUse, expert_bytes: Sequence[int]) -> GpuUse:
    """A colocated prefill instance: the whole model. expert_bytes: of each FFN rank."""
    cache = deployment.prefill.kv_cache_gib * GIB
    return GpuUse("prefill", attention.weights + sum(expert_bytes), cache, 0)


def _gpu_memory(
    resolved: Resolved, attention: GpuUse, expert_bytes: Sequence[int]
) -> Iterator[Finding]:
    """Compares the fullest GPU with the first of this host; processes may share a GPU."""
    import torch

    if not torch.cuda.is_available():
        return  # _devices has said so
    deployment = resolved.deployment
    to_ffn, to_attention = resolved.a2f.nbytes, resolved.f2a.nbytes
    slots = Buffers(resolved.slots, to_ffn, to_attention, copied=len(deployment.hosts) > 1)
    on_gpu: dict[tuple[str, int], list[GpuUse]] = {}
    for place in deployment.places():
        processes = gpu_processes(deployment, place.name)
        for own, (role, index, rank) in enumerate(processes):
            use = GpuUse("attention", attention.weights, attention.cache, slots.attention)
            if role == "ffn":
                held = expert_bytes[rank_number(index, rank, deployment.ffn.tp)]
                use = GpuUse("ffn", held, 0, slots.ffn)
            if role == "prefill":
                use = _prefill_use(deployment, attention, expert_bytes)
            gpu = gpu_order(own, len(processes), deployment.gpus)[0]
            on_gpu.setdefault((place.name, gpu), []).append(use)
    fullest = max(on_gpu.values(), key=lambda uses: sum(use.total for use in uses))
    need = sum(use.total for use in fullest)
    total = torch.cuda.get_device_properties(0).total_memory
    weights, cache, buffers = (
        sum(part) for part in zip(*((u.weights, u.cache, u.buffers) for u in fullest), strict=True)
    )
    text = (
        f"{' and '.join(use.pool for use in fullest)} on one GPU: {_size(need)} "
        f"(weights {_size(weights)}, cache {_size(cache)}, slots {_size(buffers)}) of "
        f"{_size(USABLE * total)}; the rest of its {_size(total)} is for graphs and activations"
    )
    if need > USABLE * total:
        yield Finding("bad", "memory", f"{text}: {_largest(cache, weights)}")
    else:
        yield Finding("ok", "memory", text)


def _largest(cache: float, weights: float) -> str:
    if cache >= weights:
        return f"the cache takes {_size(cache)}; lower attention.kv_cache_gib"
    return f"the weights take {_size(weights)}; use more FFN instances, or ffn.weights: mxfp4"


def _size(nbytes: float) -> str:
    return f"{nbytes / GIB:.2f} GiB"
