"""Families beside those of test_models.py: facts of published config.json files, and refusals."""

import pytest

from afd.errors import ConfigError
from afd.models import family_of
from afd.models.family import Family, MoeModel, split_form

PUBLISHED = {
    "mixtral": {
        "architectures": ["MixtralForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    },
    "minimax_m2": {
        "architectures": ["MiniMaxM2ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "torch_dtype": "bfloat16",
    },
    "glm4_moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        "hidden_size": 5120,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 92,
        "first_k_dense_replace": 3,
        "n_routed_experts": 160,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "torch_dtype": "bfloat16",
    },
    "ernie45_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "hidden_size": 2560,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 28,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 27,
        "moe_layer_interval": 1,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_k": 6,
        "use_bias": False,
        "torch_dtype": "bfloat16",
    },
    "qwen2_moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "hidden_size": 2048,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
        "torch_dtype": "bfloat16",
    },
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "decoder_sparse_step": 1,
        "torch_dtype": "bfloat16",
    },
    "gpt_oss": {
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
    "llama4": {
        "architectures": ["Llama4ForConditionalGeneration"],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_hidden_layers": 48,
            "interleave_moe_layer_step": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 1,
        },
    },
}
FACTS = {  # (MoE layers, experts, top_k, expert width, shared width, scaling)
    "mixtral": (range(32), 8, 2, 14336, 0, 1.0),
    "minimax_m2": (range(62), 256, 8, 1536, 0, 1.0),
    "glm4_moe": (range(3, 92), 160, 8, 1536, 1536, 2.5),
    "ernie45_moe": (range(1, 28), 64, 6, 1536, 3072, 1.0),
    "qwen2_moe": (range(24), 60, 4, 1408, 5632, 1.0),
    "qwen3_next": (range(48), 512, 10, 512, 0, 1.0),
    "gpt_oss": (range(36), 128, 4, 2880, 0, 1.0),
    "llama4": (range(1, 48, 2), 128, 1, 8192, 8192, 1.0),
}


def parse(name: str, **changes: object) -> tuple[Family, MoeModel]:
    config = {**PUBLISHED[name], **changes}
    family = family_of(config)
    return family, family.parse(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_facts_of_published_checkpoints(name: str) -> None:
    family, model = parse(name)
    layers, experts, top_k, width, shared, scaling = FACTS[name]
    assert family.name == model.family == name
    assert model.moe_layers == tuple(layers) and model.dtype == "bfloat16"
    assert (model.num_experts, model.top_k, model.moe_intermediate) == (experts, top_k, width)
    assert (model.shared_intermediate, model.routed_scaling) == (shared, scaling)
    assert bool(family.split) is (name == "qwen3_next")
    assert model.any_math is (name == "gpt_oss")
    assert model.weight_on_input is (name == "llama4")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("ernie45_moe", {"use_bias": True}, "use_bias"),
        ("ernie45_moe", {"moe_layer_interval": 100}, "no mixture-of-experts layer"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("minimax_m2", {"num_local_experts": 0}, "num_local_experts is 0"),
        ("llama4", {"torch_dtype": None}, "torch_dtype"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(name, **changes)


def test_the_split_form_leaves_all_but_the_routed_experts_with_vllm() -> None:
    family, _ = parse("glm4_moe")
    split = split_form(family, "glm", ("Glm4MoeForCausalLM",), "a reason")
    model = split.parse(PUBLISHED["glm4_moe"])
    assert (model.family, model.shared_intermediate, model.routed_scaling) == ("glm", 0, 1.0)
    shared = "model.layers.3.mlp.shared_experts.up_proj.weight"
    routed = "model.layers.3.mlp.experts.7.up_proj.weight"
    assert family.is_expert_weight(shared) and not split.is_expert_weight(shared)
    assert family.is_expert_weight(routed) and split.is_expert_weight(routed)
