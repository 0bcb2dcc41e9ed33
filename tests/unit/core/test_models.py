"""Model families: facts read from config.json, and refusals."""

import importlib.util
import json
from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd.models import FAMILIES, family_of, read_config, read_model

QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 94,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.5,
    "torch_dtype": "bfloat16",
}
STEP3 = {
    "architectures": ["Step3TextForCausalLM"],
    "hidden_size": 7168,
    "moe_intermediate_size": 5120,
    "num_hidden_layers": 61,
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "share_expert_dim": 5120,
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
    "dtype": "bfloat16",
}


def parse(config, **changes):
    config = {**config, **changes}
    return family_of(config).parse(config)


def test_qwen3_235b():
    model = parse(QWEN3_235B)
    assert model.moe_layers == tuple(range(94))
    assert (model.hidden, model.moe_intermediate) == (4096, 1536)
    assert (model.num_experts, model.top_k) == (128, 8)
    assert (model.shared_intermediate, model.routed_scaling) == (0, 1.0)
    assert model.dtype == "bfloat16"


def test_qwen3_sparse_step_and_dense_layers():
    model = parse(QWEN3_235B, num_hidden_layers=8, decoder_sparse_step=2, mlp_only_layers=[3])
    assert model.moe_layers == (1, 5, 7)


def test_qwen3_expert_count_under_its_generic_name():
    config = {key: value for key, value in QWEN3_235B.items() if key != "num_experts"}
    assert parse(config, num_local_experts=64).num_experts == 64


def test_deepseek_v3():
    model = parse(DEEPSEEK_V3)
    assert model.moe_layers == tuple(range(3, 61))
    assert (model.num_experts, model.top_k) == (256, 8)
    assert (model.shared_intermediate, model.routed_scaling) == (2048, 2.5)


def test_deepseek_v2_layer_frequency_and_joint_shared_width():
    model = parse(
        DEEPSEEK_V3,
        architectures=["DeepseekV2ForCausalLM"],
        num_hidden_layers=9,
        first_k_dense_replace=1,
        moe_layer_freq=3,
        n_shared_experts=2,
    )
    assert model.moe_layers == (3, 6)
    assert model.shared_intermediate == 4096


def test_deepseek_without_shared_experts():
    assert parse(DEEPSEEK_V3, n_shared_experts=None).shared_intermediate == 0


def test_step3():
    model = parse(STEP3)
    assert model.moe_layers == tuple(range(4, 60))
    assert (model.num_experts, model.top_k, model.shared_intermediate) == (48, 3, 5120)
    assert parse(STEP3, moe_layers_enum=None).moe_layers == tuple(range(1, 61))
    assert parse(STEP3, moe_layers_enum=[1, 2]).moe_layers == (1, 2)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (QWEN3_235B, {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM is not supported"),
        (QWEN3_235B, {"architectures": []}, "no architectures"),
        (QWEN3_235B, {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
        (QWEN3_235B, {"hidden_act": "gelu"}, "hidden_act"),
        (QWEN3_235B, {"hidden_size": "big"}, "hidden_size is 'big'"),
        (QWEN3_235B, {"num_experts": 0}, "num_experts is 0"),
        (QWEN3_235B, {"decoder_sparse_step": 95}, "no mixture-of-experts layer"),
        (QWEN3_235B, {"torch_dtype": None}, "torch_dtype"),
        (DEEPSEEK_V3, {"first_k_dense_replace": 61}, "no mixture-of-experts layer"),
        (DEEPSEEK_V3, {"routed_scaling_factor": None}, "routed_scaling_factor"),
        (DEEPSEEK_V3, {"llama_4_scaling": {"beta": 0.1}}, "llama_4_scaling"),
        (STEP3, {"moe_layers_enum": "4,61"}, r"layers \[61\]"),
        (STEP3, {"moe_layers_enum": "4,x"}, "moe_layers_enum"),
    ],
)
def test_refused_configs(config, changes, words):
    with pytest.raises(ConfigError, match=words):
        parse(config, **changes)


def test_missing_key_is_named():
    config = {key: value for key, value in DEEPSEEK_V3.items() if key != "n_shared_experts"}
    del config["num_experts_per_tok"]
    with pytest.raises(ConfigError, match="no num_experts_per_tok"):
        parse(config)


def test_unknown_architecture_lists_all_supported():
    with pytest.raises(ConfigError) as refused:
        family_of({"architectures": ["MysteryModel"]})
    for family in FAMILIES:
        for architecture in family.architectures:
            assert architecture in str(refused.value)


def test_serving_dtype():
    family = family_of(DEEPSEEK_V3)
    model = family.parse(DEEPSEEK_V3)
    assert family.serve_as(model, "auto") == model
    assert family.serve_as(model, "float32").dtype == "float32"
    with pytest.raises(ConfigError, match="cannot be served in float16"):
        family.serve_as(model, "float16")
    with pytest.raises(ConfigError, match="use one of auto"):
        family.serve_as(model, "int8")
    half = family.parse({**DEEPSEEK_V3, "torch_dtype": "float16"})
    with pytest.raises(ConfigError, match="cannot be served in float16"):
        family.serve_as(half, "auto")
    assert family.serve_as(half, "bfloat16").dtype == "bfloat16"
    qwen = family_of(QWEN3_235B)
    assert qwen.serve_as(qwen.parse(QWEN3_235B), "float16").dtype == "float16"


@pytest.mark.parametrize(
    ("config", "expert", "other"),
    [
        (
            QWEN3_235B,
            [
                "model.layers.93.mlp.experts.127.down_proj.weight",
                "model.layers.0.mlp.experts.gate_up_proj",
            ],
            [
                "model.layers.0.mlp.gate.weight",
                "model.layers.0.mlp.down_proj.weight",
                "model.layers.0.self_attn.q_proj.weight",
                "model.embed_tokens.weight",
                "lm_head.weight",
            ],
        ),
        (
            DEEPSEEK_V3,
            [
                "model.layers.3.mlp.experts.0.gate_proj.weight",
                "model.layers.3.mlp.shared_experts.up_proj.weight",
            ],
            [
                "model.layers.3.mlp.gate.weight",
                "model.layers.3.mlp.gate.e_score_correction_bias",
                "model.layers.0.mlp.gate_proj.weight",
            ],
        ),
        (
            STEP3,
            [
                "model.layers.4.moe.gate_proj.weight",
                "model.layers.4.moe.down_proj.weight",
                "model.layers.4.share_expert.gate_proj.weight",
            ],
            ["model.layers.4.moe.gate.weight", "model.layers.0.mlp.gate_proj.weight"],
        ),
    ],
)
def test_expert_weights_are_distinguished_from_others(config, expert, other):
    family = family_of(config)
    assert [name for name in expert if not family.is_expert_weight(name)] == []
    assert [name for name in other if family.is_expert_weight(name)] == []


def test_template_dots_are_literal():
    family = family_of(QWEN3_235B)
    assert not family.is_expert_weight("modelXlayersX0XmlpXexpertsX1Xup_projXweight")


def test_names_for_layer():
    names = family_of(QWEN3_235B).routed_names[0]
    assert names.per_expert
    filled = names.for_layer(7, 3)
    assert filled.gate_up == (
        "model.layers.7.mlp.experts.3.gate_proj.weight",
        "model.layers.7.mlp.experts.3.up_proj.weight",
    )
    stacked = family_of(STEP3).routed_names[0]
    assert not stacked.per_expert
    assert stacked.for_layer(4).down == "model.layers.4.moe.down_proj.weight"


def test_vllm_classes_exist():
    root = importlib.util.find_spec("vllm")
    if root is None or not root.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    package = Path(root.submodule_search_locations[0]).parent
    for family in FAMILIES:
        for target in family.vllm_class.values():
            module, name = target.split(":")
            source = package.joinpath(*module.split(".")).with_suffix(".py")
            assert f"class {name}(" in source.read_text()


def test_read_config_errors(tmp_path):
    with pytest.raises(ConfigError, match="is not a folder"):
        read_config(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a JSON object"):
        read_config(tmp_path)


def test_read_model(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))

    write(STEP3)
    family, model = read_model(tmp_path)
    assert (family.name, model.family) == ("step3", "step3")
    write({**DEEPSEEK_V3, "quantization_config": {"quant_method": "bitsandbytes"}})
    with pytest.raises(ConfigError, match=r"quantised .*bitsandbytes"):
        read_model(tmp_path)
    write({**QWEN3_235B, "num_experts_per_tok": 129})
    with pytest.raises(ConfigError, match="129 experts per token but has 128"):
        read_model(tmp_path)
