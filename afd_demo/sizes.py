"""Sizes of the random checkpoints."""

from dataclasses import dataclass, replace
from typing import Any

from afd.errors import ConfigError

FAMILIES = ("qwen3_moe", "deepseek_v2", "deepseek_v3", "step3")


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a random checkpoint.

    intermediate: width of one routed expert and of the shared expert.
    dense_intermediate: width of dense FFN layers.
    shared_experts: DeepSeek: number of shared experts.
    groups, top_groups: DeepSeek-V3: groups of experts, and groups chosen per token.
    mla: DeepSeek: no-position, rotary and value width of a head, rank of keys and values, rank of
        queries.
    dense_first: DeepSeek, GLM, ERNIE: dense layers before the first with experts.
    share_q_dim: Step-3: rank of queries; None: half of `hidden`.
    dense_last: Step-3: the last layer is dense too.
    linear_head: Qwen3-Next: width of a head of linear attention.
    """

    hidden: int = 256
    layers: int = 4
    experts: int = 8
    top_k: int = 2
    intermediate: int = 256
    dense_intermediate: int = 512
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 32
    vocab: int = 2048
    max_positions: int = 4096
    shared_experts: int = 1
    groups: int = 2
    top_groups: int = 1
    mla: tuple[int, int, int, int, int] = (32, 16, 32, 64, 96)
    dense_first: int = 1
    share_q_dim: int | None = None
    dense_last: bool = False
    linear_head: int = 32


PRESETS: dict[str, Sizes] = {
    "tiny": Sizes(),
    "demo": Sizes(hidden=512, layers=6, experts=16, top_k=4, heads=8, head_dim=64),
    "bench": Sizes(hidden=512, layers=8, experts=16, top_k=4, heads=16, head_dim=64, kv_heads=4),
}


def resolve(family: str, preset: str, **overrides: int | bool | None) -> Sizes:
    """Returns the sizes of a preset with the given fields replaced. None keeps a field.

    Raises:
        ConfigError: the family or preset is unknown, or the sizes contradict each other.
    """
    if family not in FAMILIES:
        raise ConfigError(f"family {family!r} is unknown; use one of {', '.join(FAMILIES)}")
    if preset not in PRESETS:
        raise ConfigError(f"preset {preset!r} is unknown; use one of {', '.join(PRESETS)}")
    given: dict[str, Any] = {key: value for key, value in overrides.items() if value is not None}
    sizes = replace(PRESETS[preset], **given)
    for key, value in vars(sizes).items():
        if isinstance(value, int) and key not in ("dense_first", "dense_last") and value < 1:
            raise ConfigError(f"{key} is {value}; use at least 1")
    if sizes.top_k > sizes.experts:
        raise ConfigError(
            f"top_k {sizes.top_k} exceeds the number of experts, {sizes.experts}; lower top_k"
        )
    dense = (family != "qwen3_moe") + sizes.dense_last
    if sizes.layers <= dense:
        raise ConfigError(f"layers is {sizes.layers}; {family} needs at least {dense + 1} layers")
    if family == "deepseek_v3" and sizes.experts % sizes.groups:
        raise ConfigError(
            f"deepseek_v3 routes in {sizes.groups} groups, which {sizes.experts} experts do not"
            f" divide into; use a multiple of {sizes.groups} experts"
        )
    if sizes.dense_last and family != "step3":
        raise ConfigError(f"dense_last is for step3 only, not {family}; remove it")
    return sizes
