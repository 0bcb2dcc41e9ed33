"""Readers of the FFN layers in a config.json. Each returns one entry per layer."""

from afd.errors import ConfigError
from afd.models.fields import Config, architecture, integer, layer_list
from afd_planner.facts.ffn import DenseFfn, Ffn, MoeFfn

_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k")
_WIDTH = ("moe_intermediate_size", "intermediate_size")


def _one_of(config: Config, keys: tuple[str, ...]) -> int:
    for key in keys:
        if config.get(key) is not None:
            return integer(config, key)
    raise ConfigError(f"config.json of {architecture(config)} has none of {', '.join(keys)}")


def _optional(config: Config, key: str) -> int:
    return 0 if config.get(key) is None else integer(config, key, minimum=0)


def dense(config: Config, layers: int) -> tuple[Ffn, ...]:
    """A gated MLP in every layer."""
    layer = DenseFfn(integer(config, "hidden_size"), integer(config, "intermediate_size"))
    return (layer,) * layers


def mixture(config: Config, layers: int) -> tuple[Ffn, ...]:
    """Routed experts, with dense layers and shared experts as configured.

    Number and width of experts are read under any of their usual names. Dense layers:
    first_k_dense_replace and moe_layer_freq (DeepSeek), decoder_sparse_step and mlp_only_layers
    (Qwen), or mlp_layer_types (Transformers), which overrides the others. Shared experts:
    n_shared_experts (DeepSeek, GLM), shared_expert_intermediate_size (Qwen2, Pangu) or
    shared_intermediate_size.
    """
    hidden, width = integer(config, "hidden_size"), _one_of(config, _WIDTH)
    shared = (
        _optional(config, "shared_expert_intermediate_size")
        or _optional(config, "shared_intermediate_size")
        or _optional(config, "n_shared_experts") * width
        or _optional(config, "num_shared_experts") * width
    )
    moe = MoeFfn(hidden, width, _one_of(config, _EXPERTS), _one_of(config, _TOP_K), shared)
    sparse = _sparse_layers(config, layers)
    if len(sparse) == layers:
        return (moe,) * layers
    plain = DenseFfn(hidden, integer(config, "intermediate_size"))
    return tuple(moe if i in sparse else plain for i in range(layers))


def _sparse_layers(config: Config, layers: int) -> set[int]:
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return {i for i, kind in enumerate(kinds) if kind == "sparse"}
    first = _optional(config, "first_k_dense_replace")
    every = integer({"moe_layer_freq": 1, **config}, "moe_layer_freq")
    step = integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    only_dense = layer_list(config, "mlp_only_layers")
    return {
        i
        for i in range(first, layers)
        if i % every == 0 and (i + 1) % step == 0 and i not in only_dense
    }


def step3(config: Config, layers: int) -> tuple[Ffn, ...]:
    """Step-3: experts in the layers of moe_layers_enum; if it is null, in all but the first."""
    hidden = integer(config, "hidden_size")
    moe = MoeFfn(
        hidden,
        integer(config, "moe_intermediate_size"),
        integer(config, "moe_num_experts"),
        integer(config, "moe_top_k"),
        integer(config, "share_expert_dim"),
    )
    plain = DenseFfn(hidden, integer(config, "intermediate_size"))
    listed = layer_list(config, "moe_layers_enum") or tuple(range(1, layers))
    return tuple(moe if i in listed else plain for i in range(layers))


def llama4(config: Config, layers: int) -> tuple[Ffn, ...]:
    """Llama 4: routed and shared experts in every interleave_moe_layer_step-th layer."""
    hidden, width = integer(config, "hidden_size"), integer(config, "intermediate_size")
    moe = MoeFfn(
        hidden,
        width,
        integer(config, "num_local_experts"),
        integer(config, "num_experts_per_tok"),
        width,
    )
    step = integer({"interleave_moe_layer_step": 1, **config}, "interleave_moe_layer_step")
    plain = DenseFfn(hidden, integer(config, "intermediate_size_mlp"))
    return tuple(moe if (i + 1) % step == 0 else plain for i in range(layers))


def ernie(config: Config, layers: int) -> tuple[Ffn, ...]:
    """ERNIE 4.5: experts in the layers moe_layer_start_index to moe_layer_end_index."""
    hidden, width = integer(config, "hidden_size"), integer(config, "moe_intermediate_size")
    moe = MoeFfn(
        hidden,
        width,
        integer(config, "moe_num_experts"),
        integer(config, "moe_k"),
        _optional(config, "moe_num_shared_experts") * width,
    )
    plain = DenseFfn(hidden, integer(config, "intermediate_size"))
    start = _optional(config, "moe_layer_start_index")
    end = config.get("moe_layer_end_index")
    last = layers - 1 if not isinstance(end, int) or end < 0 else end
    interval = integer({"moe_layer_interval": 1, **config}, "moe_layer_interval")
    return tuple(
        moe if start <= i <= last and (i + 1) % interval == 0 else plain for i in range(layers)
    )
