"""Sizes of the KV caches of a run's servers."""

from collections.abc import Sequence

from afd_bench.gpu.targets import Target
from afd_planner.facts.model import ModelSpec


def kv_bytes(
    target: Target, requests: int, length: int, model: ModelSpec, kv: str = "bfloat16"
) -> float:
    """Returns the bytes per GPU with a KV cache, for requests of ``length`` tokens.

    kv: dtype of the cache.
    """
    each = -(-requests // target.replicas)
    shards = min(group.attention.kv_shards(target.kv_gpus) for group in model.groups)
    return each * model.kv_stored_bytes(length, kv) / shards


def spread_kv_bytes(
    target: Target, requests: int, length: int, model: ModelSpec, kv: str = "bfloat16"
) -> float:
    """Returns the same averaged over all GPUs of the target, with or without a cache."""
    having = target.replicas * target.kv_gpus
    return kv_bytes(target, requests, length, model, kv) * having / target.gpus


def kv_gib(
    targets: Sequence[Target], requests: int, length: int, model: ModelSpec, kv: str = "bfloat16"
) -> float:
    """Returns the GiB per GPU that hold all requests at full length on any target.

    Counts all GPUs of a target, with or without a cache, as ``Sizes.kv_gib`` does.
    """
    most = max(spread_kv_bytes(target, requests, length, model, kv) for target in targets)
    return 1.1 * most / 2**30 + 0.1


def default_gib(device: str) -> float:
    """Returns the default ``Sizes.kv_gib`` of a device.

    On CPU it is small: vLLM touches the whole cache at its start, and all servers of a dry run
    share the host's memory.
    """
    return 0.25 if device == "cpu" else 8.0
