"""ERNIE 4.5 MoE (text): routed and shared experts, dense first layers, a router in float32.

Source: vLLM 0.26 models/ernie45_moe.py; config.json of baidu/ERNIE-4.5-21B-A3B-PT.
"""

from afd.errors import ConfigError
from afd.models import fields
from afd.models.deepseek import ROUTED_NAMES, SHARED_MODULES, SHARED_NAMES
from afd.models.family import Family, MoeModel


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of an ERNIE 4.5 config.json. Raises ConfigError if it is unsupported."""
    fields.require_silu(config)
    if config.get("use_bias"):
        raise ConfigError("this ERNIE checkpoint has use_bias, which is not supported")
    num_layers = fields.integer(config, "num_hidden_layers")
    width = fields.integer(config, "moe_intermediate_size")
    given = {
        "moe_layer_start_index": 0,
        "moe_layer_end_index": num_layers - 1,
        "moe_layer_interval": 1,
        "moe_num_shared_experts": 0,
        **config,
    }
    start = fields.integer(given, "moe_layer_start_index", minimum=0)
    end = fields.integer(given, "moe_layer_end_index", minimum=0)
    every = fields.integer(given, "moe_layer_interval")
    sparse = tuple(i for i in range(num_layers) if start <= i <= end and (i + 1) % every == 0)
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, sparse, num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=width,
        num_experts=fields.integer(config, "moe_num_experts"),
        top_k=fields.integer(config, "moe_k"),
        shared_intermediate=width * fields.integer(given, "moe_num_shared_experts", minimum=0),
        routed_scaling=1.0,
        dtype=fields.dtype(config),
    )


FAMILY = Family(
    name="ernie45_moe",
    vllm_class={
        "Ernie4_5_MoeForCausalLM": "vllm.model_executor.models.ernie45_moe:Ernie4_5_MoeForCausalLM"
    },
    parse=parse,
    float32_gate=True,
    shared=SHARED_MODULES,
    routed_names=ROUTED_NAMES,
    shared_names=SHARED_NAMES,
)
