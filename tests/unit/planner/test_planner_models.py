"""Model data: published parameter counts, layer kinds, and config.json of other families."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd_planner.facts.attention import projection_parameters, projection_parameters_per_gpu
from afd_planner.facts.ffn import DenseFfn, MoeFfn
from afd_planner.facts.model_hf import from_config, load_model, models

ROOT = Path(__file__).parents[3]
KINDS = {
    "step-3": {"mfa": 61},
    "deepseek-v3": {"mla": 61},
    "kimi-k2": {"mla": 61},
    "qwen3-235b-a22b": {"gqa": 94},
    "qwen3-30b-a3b": {"gqa": 48},
    "qwen3-32b": {"gqa": 64},
    "llama4-maverick": {"gqa": 12, "chunked": 36},
    "minimax-m1": {"linear": 70, "gqa": 10},
    "ernie-4.5-300b-a47b": {"gqa": 54},
    "pangu-pro-moe": {"gqa": 48},
    "glm-4.6": {"gqa": 92},
    "gpt-oss-120b": {"sliding": 18, "gqa": 18},
}
MOE_LAYERS = {
    "step-3": tuple(range(4, 60)),
    "deepseek-v3": tuple(range(3, 61)),
    "kimi-k2": tuple(range(1, 61)),
    "qwen3-32b": (),
    "llama4-maverick": tuple(range(1, 48, 2)),
    "ernie-4.5-300b-a47b": tuple(range(3, 54)),
    "glm-4.6": tuple(range(3, 92)),
    "gpt-oss-120b": tuple(range(36)),
}


def test_all_models_are_there():
    assert set(KINDS) <= set(models())


@pytest.mark.parametrize("name", models())
def test_total_parameters_equal_the_published_ones(name):
    model = load_model(name)
    tolerance = 0.03 if model.published_total == 1e12 else 0.005  # "1T" is rounded to one digit
    assert model.parameters == pytest.approx(model.published_total, rel=tolerance)


@pytest.mark.parametrize("name", models())
def test_activated_parameters_agree_with_the_published_ones(name):
    """Publishers count the LM head and the embedding, one of them, or neither."""
    model = load_model(name)
    table = model.vocab * model.hidden
    half_digit = 0.05e9 if model.published_activated % 1e9 else 0.5e9
    low = model.activated_parameters - table - half_digit
    high = model.activated_parameters + table + half_digit
    assert low <= model.published_activated <= high
    assert model.activated_parameters <= model.parameters


@pytest.mark.parametrize("name", models())
def test_groups_partition_the_layers(name):
    model = load_model(name)
    layers = sorted(layer for group in model.groups for layer in group.layers)
    assert layers == list(range(model.num_layers))
    assert model.sources and model.max_context > 0


@pytest.mark.parametrize("name", KINDS)
def test_attention_kinds(name):
    found: dict[str, int] = {}
    for group in load_model(name).groups:
        found[group.attention.kind] = found.get(group.attention.kind, 0) + len(group.layers)
    assert found == KINDS[name]


@pytest.mark.parametrize("name", MOE_LAYERS)
def test_moe_layers(name):
    assert load_model(name).moe_layers == MOE_LAYERS[name]


def test_sparsity_counts_shared_experts():
    assert load_model("step-3").groups[1].ffn.sparsity == pytest.approx(4 / 49)
    assert load_model("deepseek-v3").groups[1].ffn.sparsity == pytest.approx(9 / 257)


def test_windowed_and_linear_attention_stop_growing_with_context():
    maverick, m1 = load_model("llama4-maverick"), load_model("minimax-m1")
    chunked = next(g.attention for g in maverick.groups if g.attention.kind == "chunked")
    linear = next(g.attention for g in m1.groups if g.attention.kind == "linear")
    for attention in (chunked, linear):
        at_8k, at_64k = (attention.kv_stored_bytes(c, "fp8") for c in (8192, 65536))
        assert at_8k == at_64k
        assert attention.core_flops(8192) == attention.core_flops(65536)
    assert linear.kv_read_bytes(1, "fp8") == 2 * linear.kv_stored_bytes(1, "fp8")


@pytest.mark.parametrize("name", models())
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_shards_add_up(name, tp):
    for group in load_model(name).groups:
        attention = group.attention
        per_gpu = projection_parameters_per_gpu(attention, tp)
        copied = sum(p.parameters for p in attention.projections() if not p.split)
        whole = projection_parameters(attention)
        assert per_gpu * tp == pytest.approx(whole + copied * (tp - 1))
        assert 1 <= attention.kv_shards(tp) <= tp


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "torch_dtype": "bfloat16",
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_hidden_layers": 24,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "quantization_config": {"quant_method": "mxfp4"},
}
QWEN3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "vocab_size": 151936,
}
GLM = {
    "architectures": ["Glm4MoeForCausalLM"],
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "n_routed_experts": 160,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 3,
    "vocab_size": 151552,
}
DEEPSEEK_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "vocab_size": 102400,
}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "torch_dtype": "bfloat16",
    "text_config": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "vocab_size": 262208,
    },
}


@pytest.mark.parametrize(
    ("config", "total", "kinds", "dtype"),
    [
        (MIXTRAL, 46.7e9, {"gqa": 32}, "bfloat16"),
        (LLAMA, 8.03e9, {"gqa": 32}, "bfloat16"),
        (GPT_OSS, 20.9e9, {"sliding": 12, "gqa": 12}, "mxfp4"),
        (QWEN3_NEXT, 79.7e9, {"linear": 36, "gqa": 12}, "bfloat16"),
        (GLM, 352.8e9, {"gqa": 92}, "bfloat16"),
        (DEEPSEEK_LITE, 15.7e9, {"mla": 27}, "bfloat16"),
        (GEMMA, 27.0e9, {"sliding": 52, "gqa": 10}, "bfloat16"),
    ],
    ids=["mixtral", "llama", "gpt-oss", "qwen3-next", "glm-4.5", "deepseek-v2-lite", "gemma-3"],
)
def test_other_families(config, total, kinds, dtype):
    """Totals are from the model cards; for GLM-4.5 (355B), minus the MTP layer that it includes."""
    model = from_config(config, "x")
    assert model.parameters == pytest.approx(total, rel=0.005)
    found: dict[str, int] = {}
    for group in model.groups:
        found[group.attention.kind] = found.get(group.attention.kind, 0) + len(group.layers)
    assert (found, model.dtype) == (kinds, dtype)


@pytest.mark.parametrize(
    "folder", [ROOT / "afd_launch/data/demo/afd-tiny-chat"], ids=lambda p: p.name
)
def test_local_checkpoints_are_read(folder):
    model = load_model(str(folder))
    assert model.name == folder.name and model.moe_layers
    assert load_model(str(folder / "config.json")).groups == model.groups


def test_deployable_families_agree_with_the_server(tmp_path):
    from afd.models import read_model

    for folder in [ROOT / "afd_launch/data/demo/afd-tiny-chat"]:
        _, served = read_model(folder)
        model = load_model(str(folder))
        moe = next(g.ffn for g in model.groups if isinstance(g.ffn, MoeFfn))
        assert model.moe_layers == served.moe_layers
        assert (moe.experts, moe.top_k) == (served.num_experts, served.top_k)
        assert (moe.intermediate, moe.hidden) == (served.moe_intermediate, served.hidden)
        assert moe.shared_intermediate == served.shared_intermediate


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "does not know the architecture MambaForCausalLM",
        ),
        ({"architectures": []}, "no architectures entry"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"num_local_experts": None}, "has none of num_experts, n_routed_experts"),
        ({"num_key_value_heads": 0.5}, "num_key_value_heads is 0.5, expected a whole number"),
        ({"layer_types": ["full_attention"]}, "layer_types must have 32 entries"),
        (
            {"layer_types": ["mamba"] * 32},
            "layer_types names mamba, which the planner cannot price",
        ),
    ],
)
def test_refused_configs(change, words):
    with pytest.raises(ConfigError, match=words):
        from_config({**MIXTRAL, **change}, "x")


def test_unknown_model_names_the_known_ones(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'gpt-7' is unknown and no such path exists.*step-3.*or a folder"
    ):
        load_model("gpt-7")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        load_model(str(tmp_path / "config.json"))
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL))
    assert load_model(str(tmp_path)).num_layers == 32


@given(rows=st.integers(0, 400), experts=st.integers(2, 64), data=st.data())
def test_expected_experts_is_bounded_and_monotone(rows, experts, data):
    moe = MoeFfn(64, 32, experts, data.draw(st.integers(1, experts)))
    few, more = (moe.expected_experts(n) for n in (rows, rows + 1))
    assert 0 <= few <= more <= experts + 1e-9
    assert moe.expected_experts(1) == pytest.approx(moe.top_k)


def test_expected_experts_equals_a_random_simulation():
    moe, rows = MoeFfn(64, 32, 48, 3), 20
    random = np.random.default_rng(0)
    drawn = [
        len({int(e) for _ in range(rows) for e in random.choice(48, 3, replace=False)})
        for _ in range(400)
    ]
    assert np.mean(drawn) == pytest.approx(moe.expected_experts(rows), rel=0.01)


def test_touched_parameters():
    moe, dense = MoeFfn(64, 32, 8, 2, 16), DenseFfn(64, 32)
    assert moe.touched_parameters(0) == dense.touched_parameters(0) == 0
    assert moe.touched_parameters(1) == moe.activated_parameters
    assert moe.touched_parameters(1e6) == pytest.approx(moe.parameters)
    assert dense.touched_parameters(5) == dense.parameters == 3 * 64 * 32
