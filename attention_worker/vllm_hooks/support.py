"""Refuses vLLM settings that attention instances do not support, before anything is loaded."""

import os
from typing import get_args

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from afd.config.prefill import Connector
from afd.config.vllm_arguments import BENCH_CONNECTOR
from afd.errors import ConfigError
from attention_worker.kernels.mqa import refusal
from attention_worker.vllm_hooks.generations import FIRST, SWITCH


def check_runner(config: VllmConfig) -> None:
    """Raises ConfigError if vLLM takes its second-generation model runner in spite of
    ``VLLM_USE_V2_MODEL_RUNNER=0``, as it does for watermarks since 0.30 (vllm/config/vllm.py:
    use_v2_model_runner)."""
    if config.use_v2_model_runner and os.environ.get(SWITCH) == FIRST:
        raise ConfigError(
            "vLLM serves --watermark-config with its second-generation model runner only; set"
            " VLLM_USE_V2_MODEL_RUNNER=1. With the section prefill, or with draft layers and"
            " pipeline.graphs, remove --watermark-config"
        )


def check_supported(config: VllmConfig) -> None:
    """Raises ConfigError for vLLM settings that the layer pipeline would silently ignore."""
    problems = {
        "pipeline or context parallelism inside an attention instance (use attention.tp)": (
            config.parallel_config.world_size > config.parallel_config.tensor_parallel_size
            or config.parallel_config.decode_context_parallel_size > 1
        ),
        "vLLM's expert parallelism (experts are on FFN instances)": (
            config.parallel_config.enable_expert_parallel
        ),
        "data parallelism of vLLM (use attention.instances)": (
            config.parallel_config.data_parallel_size > 1
        ),
        "speculative decoding other than n-gram, MTP and EAGLE": (
            config.speculative_config is not None
            and config.speculative_config.method not in ("ngram", "mtp", "eagle", "eagle3")
        ),
        "this KV connector (use the section prefill)": (
            config.kv_transfer_config is not None
            and config.kv_transfer_config.kv_connector
            not in (BENCH_CONNECTOR, *get_args(Connector))
        ),
    }
    found = [what for what, present in problems.items() if present]
    if found:
        raise ConfigError(
            f"not supported on attention instances: {'; '.join(found)}; "
            "remove it from attention.vllm_args"
        )
    speculation = config.speculative_config
    if speculation is not None and config.model_config.is_hybrid and current_platform.is_cpu():
        # vLLM's kernel (causal_conv1d_update_cpu) refuses a request that has fewer tokens than were
        # accepted of its last step. MTP has the same number of drafts in every step.
        if speculation.method == "ngram":
            raise ConfigError(
                "vLLM on CPUs has no n-gram speculation for linear attention; set"
                " attention.speculation.method to mtp, or remove it"
            )
        # vLLM moves the states of linear attention between cached blocks with a Triton kernel.
        if config.cache_config.enable_prefix_caching:
            raise ConfigError(
                "vLLM on CPUs has no prefix caching for linear attention with speculation; set"
                " attention.enable_prefix_caching: false, or remove attention.speculation"
            )
    if config.attention_config.backend is AttentionBackendEnum.CUSTOM:
        model = config.model_config
        refused = refusal(
            config.cache_config.cache_dtype,
            model.get_num_kv_heads(config.parallel_config),
            model.get_head_size(),
        )
        if refused:
            raise ConfigError(refused)
