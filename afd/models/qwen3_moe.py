"""Qwen3-MoE: routed experts only. Source: vLLM 0.26 models/qwen3_moe.py."""

from afd.errors import ConfigError
from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a Qwen3-MoE config.json. Raises ConfigError if it is unsupported."""
    fields.require_silu(config)
    if config.get("shared_expert_intermediate_size"):
        raise ConfigError(
            f"{fields.architecture(config)} with shared_expert_intermediate_size is not supported: "
            "its shared expert has its own sigmoid gate; use a checkpoint without a shared expert"
        )
    num_layers = fields.integer(config, "num_hidden_layers")
    step = fields.integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    dense = fields.layer_list(config, "mlp_only_layers")
    # Transformers 5 may write the expert count under its generic name.
    experts_key = "num_experts" if "num_experts" in config else "num_local_experts"
    sparse = (i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, tuple(sparse), num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=fields.integer(config, "moe_intermediate_size"),
        num_experts=fields.integer(config, experts_key),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=0,
        routed_scaling=1.0,
        dtype=fields.dtype(config),
    )


_EXPERTS = "model.layers.{layer}.mlp.experts."

FAMILY = Family(
    name="qwen3_moe",
    vllm_class={"Qwen3MoeForCausalLM": "vllm.model_executor.models.qwen3_moe:Qwen3MoeForCausalLM"},
    parse=parse,
    eagle3=True,
    gate="mlp.gate",
    experts="mlp.experts",
    fused="heads",
    routed_names=(
        MlpNames(
            (_EXPERTS + "{expert}.gate_proj.weight", _EXPERTS + "{expert}.up_proj.weight"),
            _EXPERTS + "{expert}.down_proj.weight",
        ),
        # Transformers 5 keeps all experts of a layer in two stacked parameters.
        MlpNames((_EXPERTS + "gate_up_proj",), _EXPERTS + "down_proj"),
    ),
)
