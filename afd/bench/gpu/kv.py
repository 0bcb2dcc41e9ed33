"""How much KV cache a run's servers need."""

from collections.abc import Sequence

from afd.bench.gpu.targets import Target
from afd.planner.facts.model import ModelSpec


def kv_bytes(
    target: Target, requests: int, length: int, model: ModelSpec, kv: str = "bfloat16"
) -> float:
    """Cache of each GPU that has one when every request is ``length`` tokens long. kv: its type."""
    each = -(-requests // target.replicas)
    shards = min(group.attention.kv_shards(target.kv_gpus) for group in model.groups)
    return each * model.kv_stored_bytes(length, kv) / shards


def spread_kv_bytes(
    target: Target, requests: int, length: int, model: ModelSpec, kv: str = "bfloat16"
) -> float:
    """The same per GPU of the target, those without a cache counted too."""
    having = target.replicas * target.kv_gpus
    return kv_bytes(target, requests, length, model, kv) * having / target.gpus


def kv_gib(targets: Sequence[Target], requests: int, length: int, model: ModelSpec) -> float:
    """Per GPU, those without a cache counted too, for all requests at full length on any of the
    targets."""
    most = max(spread_kv_bytes(target, requests, length, model) for target in targets)
    return 1.1 * most / 2**30 + 0.1


def default_gib(device: str) -> float:
    """Per GPU, those without a cache counted too, where neither the user nor the requests decide.

    vLLM touches a CPU's whole cache as it starts, and all servers of a dry run share one host's
    memory: with the cache of a GPU a deployment of two would take 16 GiB of it.
    """
    return 0.25 if device == "cpu" else 8.0
