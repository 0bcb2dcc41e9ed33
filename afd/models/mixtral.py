"""Mixtral: routed experts only. Source: vLLM 0.26 models/mixtral.py."""

from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel


def parse(config: fields.Config, family: str = "mixtral") -> MoeModel:
    """Returns the MoeModel of a config.json with Mixtral's keys.

    Raises:
        ConfigError: it is unsupported.
    """
    fields.require_silu(config)
    num_layers = fields.integer(config, "num_hidden_layers")
    return MoeModel(
        family=family,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=fields.integer(config, "intermediate_size"),
        num_experts=fields.integer(config, "num_local_experts"),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=0,
        routed_scaling=1.0,
        dtype=fields.dtype(config),
    )


_EXPERT = "model.layers.{layer}.block_sparse_moe.experts.{expert}."

FAMILY = Family(
    name="mixtral",
    vllm_class={"MixtralForCausalLM": "vllm.model_executor.models.mixtral:MixtralForCausalLM"},
    parse=parse,
    gate="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    routed_names=(MlpNames((_EXPERT + "w1.weight", _EXPERT + "w3.weight"), _EXPERT + "w2.weight"),),
)
