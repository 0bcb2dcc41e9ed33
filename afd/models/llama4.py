"""Llama 4 (text): one routed expert per token, whose weight scales the input, and a shared expert.

The published checkpoints have an image encoder, which is not loaded.

Sources: vLLM 0.26 models/llama4.py, models/mllama4.py; config.json of
meta-llama/Llama-4-Scout-17B-16E-Instruct and Llama-4-Maverick-17B-128E-Instruct.
"""

from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a Llama 4 config.json. Raises ConfigError if it is unsupported."""
    config = fields.text_config(config)
    fields.require_silu(config)
    num_layers = fields.integer(config, "num_hidden_layers")
    step = fields.integer(config, "interleave_moe_layer_step")
    sparse = tuple(i for i in range(num_layers) if (i + 1) % step == 0)
    width = fields.integer(config, "intermediate_size")
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, sparse, num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=width,
        num_experts=fields.integer(config, "num_local_experts"),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=width,
        routed_scaling=1.0,
        dtype=fields.dtype(config),
        weight_on_input=True,
    )


_FFN = "language_model.model.layers.{layer}.feed_forward."

FAMILY = Family(
    name="llama4",
    vllm_class={
        "Llama4ForConditionalGeneration": "vllm.model_executor.models.llama4:Llama4ForCausalLM"
    },
    parse=parse,
    text_prefix={"Llama4ForConditionalGeneration": "language_model."},
    gate="feed_forward.router",
    experts="feed_forward.experts",
    dense="feed_forward",
    # vLLM's MoE runner holds a second reference, which would keep the module's memory.
    shared=("feed_forward.shared_expert", "feed_forward.experts._shared_experts"),
    routed_names=(
        MlpNames((_FFN + "experts.gate_up_proj",), _FFN + "experts.down_proj", transposed=True),
        MlpNames(
            (_FFN + "experts.{expert}.gate_proj.weight", _FFN + "experts.{expert}.up_proj.weight"),
            _FFN + "experts.{expert}.down_proj.weight",
        ),
    ),
    shared_names=MlpNames(
        (_FFN + "shared_expert.gate_proj.weight", _FFN + "shared_expert.up_proj.weight"),
        _FFN + "shared_expert.down_proj.weight",
    ),
)
