"""gpt-oss: biases, a clamped SwiGLU, attention sinks; the experts of a layer in stacked tensors.

Sources: vLLM 0.26 models/gpt_oss.py (`_load_weights_mxfp4`, `_load_weights_other`) and
layers/activation.py (`SwigluOAIAndMul`); config.json of openai/gpt-oss-20b.
"""

from afd.errors import ConfigError
from afd.models import fields
from afd.models.family import Family, MlpNames, MoeModel


def parse(config: fields.Config) -> MoeModel:
    """Returns the MoeModel of a gpt-oss config.json. Raises ConfigError if it is unsupported."""
    fields.require_silu(config)
    limit = config.get("swiglu_limit", 7.0)
    if limit != 7.0:
        raise ConfigError(f"swiglu_limit is {limit!r}, but only 7.0 is supported")
    num_layers = fields.integer(config, "num_hidden_layers")
    return MoeModel(
        family=FAMILY.name,
        architecture=fields.architecture(config),
        num_layers=num_layers,
        moe_layers=tuple(range(num_layers)),
        hidden=fields.integer(config, "hidden_size"),
        moe_intermediate=fields.integer(config, "intermediate_size"),
        num_experts=fields.integer(config, "num_local_experts"),
        top_k=fields.integer(config, "num_experts_per_tok"),
        shared_intermediate=0,
        routed_scaling=1.0,
        # The published config.json has no dtype; its unquantised tensors are bfloat16.
        dtype=fields.dtype({"torch_dtype": "bfloat16", **config}),
        activation="swiglu_oai",
        expert_bias=True,
    )


_EXPERTS = "model.layers.{layer}.mlp.experts."

FAMILY = Family(
    name="gpt_oss",
    vllm_class={"GptOssForCausalLM": "vllm.model_executor.models.gpt_oss:GptOssForCausalLM"},
    parse=parse,
    attention="attn",
    gate="mlp.router",
    routed_names=(
        MlpNames(
            (_EXPERTS + "gate_up_proj",),
            _EXPERTS + "down_proj",
            transposed=True,  # unquantised only: MXFP4 blocks run along the input
            interleaved=True,
        ),
    ),
)
