"""Step-3 (text): stacked routed experts, one shared expert, MoE layers given by a list.

Source: vLLM 0.26 models/step3_text.py, models/step3_vl.py and
transformers_utils/configs/step3_vl.py. The published checkpoint has an image encoder, which is not
loaded.
"""

from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a Step-3 config.json. Raises ConfigError if it is unsupported."""
    config = fields.text_config(config)
    num_layers = fields.integer(config, "num_hidden_layers")
    # As in vLLM: a null list means all layers except the first.
    listed = fields.layer_list(config, "moe_layers_enum") or tuple(range(1, num_layers))
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, listed, num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=fields.integer(config, "moe_intermediate_size"),
        num_experts=fields.integer(config, "moe_num_experts"),
        top_k=fields.integer(config, "moe_top_k"),
        shared_intermediate=fields.integer(config, "share_expert_dim"),
        routed_scaling=1.0,
        dtype=fields.dtype(config),
    )


_LAYER = "model.layers.{layer}."
_CLASS = "vllm.model_executor.models.step3_text:Step3TextForCausalLM"

FAMILY = Family(
    name="step3",
    vllm_class={
        "Step3TextForCausalLM": _CLASS,
        "Step3VLForConditionalGeneration": _CLASS,
    },
    parse=parse,
    text_prefix={"Step3VLForConditionalGeneration": ""},
    gate="moe.gate",
    experts="moe.experts",
    fused="low_rank",
    shared=("share_expert",),
    routed_names=(
        MlpNames(
            (_LAYER + "moe.gate_proj.weight", _LAYER + "moe.up_proj.weight"),
            _LAYER + "moe.down_proj.weight",
        ),
    ),
    shared_names=MlpNames(
        (_LAYER + "share_expert.gate_proj.weight", _LAYER + "share_expert.up_proj.weight"),
        _LAYER + "share_expert.down_proj.weight",
    ),
)
