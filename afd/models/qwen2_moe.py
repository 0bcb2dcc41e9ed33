"""Qwen2-MoE and Qwen3-Next: a shared expert behind a sigmoid gate.

Sources: vLLM 0.26 models/qwen2_moe.py, models/qwen3_next.py; config.json of
Qwen/Qwen1.5-MoE-A2.7B, Qwen/Qwen2-57B-A14B-Instruct and Qwen/Qwen3-Next-80B-A3B-Instruct.
"""

from dataclasses import replace

from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel, split_form


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a Qwen2-MoE config.json. Raises ConfigError if it is unsupported."""
    fields.require_silu(config)
    num_layers = fields.integer(config, "num_hidden_layers")
    step = fields.integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step")
    dense = fields.layer_list(config, "mlp_only_layers")
    sparse = (i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=fields.require_moe_layers(config, tuple(sparse), num_layers),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=fields.integer(config, "moe_intermediate_size"),
        num_experts=fields.integer(config, "num_experts"),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=fields.integer(config, "shared_expert_intermediate_size", minimum=0),
        routed_scaling=1.0,
        dtype=fields.dtype(config),
    )


_MLP = "model.layers.{layer}.mlp."
_ROUTED = (
    MlpNames(
        (_MLP + "experts.{expert}.gate_proj.weight", _MLP + "experts.{expert}.up_proj.weight"),
        _MLP + "experts.{expert}.down_proj.weight",
    ),
    # Transformers 5 keeps all experts of a layer in two stacked parameters.
    MlpNames((_MLP + "experts.gate_up_proj",), _MLP + "experts.down_proj"),
)
_MODELS = "vllm.model_executor.models"

FAMILY = Family(
    name="qwen2_moe",
    vllm_class={"Qwen2MoeForCausalLM": f"{_MODELS}.qwen2_moe:Qwen2MoeForCausalLM"},
    parse=parse,
    # vLLM's MoE runner holds a second reference, and the expert one of its gate.
    shared=("mlp.shared_expert", "mlp.experts._shared_experts", "mlp.shared_expert_gate"),
    routed_names=_ROUTED,
    shared_names=MlpNames(
        (_MLP + "shared_expert.gate_proj.weight", _MLP + "shared_expert.up_proj.weight"),
        _MLP + "shared_expert.down_proj.weight",
    ),
    shared_gate=_MLP + "shared_expert_gate.weight",
)

NEXT = replace(
    split_form(
        FAMILY,
        "qwen3_next",
        ("Qwen3NextForCausalLM",),
        "three of four layers are linear attention, whose state is not kept per micro-batch",
    ),
    vllm_class={"Qwen3NextForCausalLM": f"{_MODELS}.qwen3_next:Qwen3NextForCausalLM"},
    mtp=("Qwen3NextMTP", f"{_MODELS}.qwen3_next_mtp:Qwen3NextMTP"),
    draft_prefix="mtp.",
    # vLLM 0.26 on CPU: its kernel needs a float32 state, which vLLM sets only if there is AMX.
    cpu_args=("--mamba-ssm-cache-dtype=float32",),
)
