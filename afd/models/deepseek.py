"""DeepSeek V2 to V3.2, R1 and Kimi K2: routed and shared experts, dense first layers.

Source: vLLM 0.26 models/deepseek_v2.py. The routed sum is scaled before the shared output is added:
layers/fused_moe/runner/moe_runner.py (`_maybe_apply_routed_scale_to_output`).
"""

from dataclasses import replace

from afd.errors import ConfigError
from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel, split_form


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a DeepSeek config.json. Raises ConfigError if it is unsupported."""
    fields.require_silu(config)
    if config.get("llama_4_scaling") is not None:
        raise ConfigError(
            "this DeepSeek checkpoint uses llama_4_scaling, which is not supported; "
            "serve it with plain vLLM"
        )
    num_layers = fields.integer(config, "num_hidden_layers")
    dense = fields.integer(config, "first_k_dense_replace", minimum=0)
    every = fields.integer({"moe_layer_freq": 1, **config}, "moe_layer_freq")
    width = fields.integer(config, "moe_intermediate_size")
    no_shared = config.get("n_shared_experts") is None
    shared = 0 if no_shared else fields.integer(config, "n_shared_experts", minimum=0)
    sparse = tuple(i for i in range(dense, num_layers) if i % every == 0)
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, sparse, num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=width,
        num_experts=fields.integer(config, "n_routed_experts"),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=shared * width,
        routed_scaling=fields.number(config, "routed_scaling_factor"),
        dtype=fields.dtype(config),
    )


_MLP = "model.layers.{layer}.mlp."
_MODULE = "vllm.model_executor.models.deepseek_v2"

ROUTED_NAMES = (
    MlpNames(
        (_MLP + "experts.{expert}.gate_proj.weight", _MLP + "experts.{expert}.up_proj.weight"),
        _MLP + "experts.{expert}.down_proj.weight",
    ),
    # Transformers 5 keeps all experts of a layer in two stacked parameters.
    MlpNames((_MLP + "experts.gate_up_proj",), _MLP + "experts.down_proj"),
)
SHARED_NAMES = MlpNames(
    (_MLP + "shared_experts.gate_proj.weight", _MLP + "shared_experts.up_proj.weight"),
    _MLP + "shared_experts.down_proj.weight",
)
# vLLM's MoE runner holds a second reference, which would keep the module's memory.
SHARED_MODULES = ("mlp.shared_experts", "mlp.experts._shared_experts")

FAMILY = Family(
    name="deepseek",
    vllm_class={
        "DeepseekV2ForCausalLM": f"{_MODULE}:DeepseekV2ForCausalLM",
        "DeepseekV3ForCausalLM": f"{_MODULE}:DeepseekV3ForCausalLM",
    },
    parse=parse,
    shared=SHARED_MODULES,
    routed_names=ROUTED_NAMES,
    shared_names=SHARED_NAMES,
    refused_dtypes={
        "float16": "vLLM rescales DeepSeek's hidden states in float16, so the experts' output "
        "would be wrong; set attention.dtype to bfloat16 or float32"
    },
    mtp=("DeepSeekMTPModel", "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP"),
    eagle3=True,
    attention_none=("llama_4_scaling",),  # parse refuses it
    # vLLM 0.26 on CPU: no MLA attention backend, and its rotary operator is wrong for DeepSeek.
    cpu_env={"VLLM_MLA_DISABLE": "1"},
    cpu_args=('-cc.custom_ops=["all","-rotary_embedding"]',),
)

V32 = replace(
    split_form(
        FAMILY,
        "deepseek_v32",
        ("DeepseekV32ForCausalLM",),
        "its sparse-attention indexer has not been run in micro-batches",
    ),
    sparse="index_topk",
)
