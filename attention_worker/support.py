"""What an attention instance does not support yet, refused before anything is loaded."""

from vllm.config import VllmConfig

from afd.errors import ConfigError


def check_supported(config: VllmConfig) -> None:
    """Raise ConfigError for vLLM settings that the layer pipeline would silently ignore."""
    problems = {
        "tensor or pipeline parallelism inside an attention instance (use attention.instances)": (
            config.parallel_config.world_size > 1
        ),
        "data parallelism of vLLM (use attention.instances)": (
            config.parallel_config.data_parallel_size > 1
        ),
        "speculative decoding": config.speculative_config is not None,
        "LoRA adapters": config.lora_config is not None,
        "quantised checkpoints": config.quant_config is not None,
    }
    found = [what for what, present in problems.items() if present]
    if found:
        raise ConfigError(
            f"not supported on attention instances: {'; '.join(found)}; "
            "remove it from attention.vllm_args"
        )
