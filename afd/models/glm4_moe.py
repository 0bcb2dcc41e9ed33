"""GLM-4.5 and GLM-4.6: DeepSeek-V3's experts behind grouped-query attention.

Source: vLLM 0.26 models/glm4_moe.py. Its checkpoints name the experts as DeepSeek's do; the
draft layer follows the last decoder layer.
"""

from afd.models import fields
from afd.models.deepseek import ROUTED_NAMES, SHARED_MODULES, SHARED_NAMES
from afd.models.family import Family, MoeModel


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a GLM-4.5 config.json. Raises ConfigError if it is unsupported."""
    fields.require_silu(config)
    num_layers = fields.integer(config, "num_hidden_layers")
    dense = fields.integer(config, "first_k_dense_replace", minimum=0)
    width = fields.integer(config, "moe_intermediate_size")
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, tuple(range(dense, num_layers)), num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=width,
        num_experts=fields.integer(config, "n_routed_experts"),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=width * fields.integer(config, "n_shared_experts", minimum=0),
        routed_scaling=fields.number(config, "routed_scaling_factor"),
        dtype=fields.dtype(config),
    )


FAMILY = Family(
    name="glm4_moe",
    vllm_class={"Glm4MoeForCausalLM": "vllm.model_executor.models.glm4_moe:Glm4MoeForCausalLM"},
    parse=parse,
    float32_gate=True,
    mtp=("Glm4MoeMTPModel", "vllm.model_executor.models.glm4_moe_mtp:Glm4MoeMTP"),
    shared=SHARED_MODULES,
    routed_names=ROUTED_NAMES,
    shared_names=SHARED_NAMES,
)
