"""Refuses vLLM settings that attention instances do not support, before anything is loaded."""

from typing import get_args

from vllm.config import VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from afd.config.prefill import Connector
from afd.config.vllm_arguments import BENCH_CONNECTOR
from afd.errors import ConfigError
from attention_worker.kernels.mqa import refusal


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
        "speculative decoding other than n-gram and MTP": (
            config.speculative_config is not None
            and config.speculative_config.method not in ("ngram", "mtp")
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
    if config.attention_config.backend is AttentionBackendEnum.CUSTOM:
        model = config.model_config
        refused = refusal(
            config.cache_config.cache_dtype,
            model.get_num_kv_heads(config.parallel_config),
            model.get_head_size(),
        )
        if refused:
            raise ConfigError(refused)
