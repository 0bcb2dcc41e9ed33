"""quantization_config of published checkpoints: formats, modules left out, refusals."""

import json

import pytest

from afd.errors import ConfigError
from afd.models import read_quantization
from afd.models.quantization import quantization_of
from afd.models.weight_format import (
    SUFFIXES,
    Layout,
    tensor_name,
    weight_names,
)

EXPERT = "model.layers.3.mlp.experts.7.down_proj"
Q_PROJ = "model.layers.3.self_attn.q_proj"


def group(weights, name="pack-quantized", targets=("Linear",), **more):
    entry = {"targets": list(targets), "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "config_groups": {"group_0": entry},
        **more,
    }


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MX = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}

PUBLISHED = {
    # deepseek-ai/DeepSeek-V3, moonshotai/Kimi-K2-Instruct
    "deepseek-v3": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "minimax-m2": {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
    },
    "mixtral-fp8": {"quant_method": "fp8", "activation_scheme": "static"},
    "glm-4.6-fp8": group(FP8, "float-quantized", ignore=["lm_head", "model.layers.3.mlp.gate"]),
    "kimi-k2-thinking": group(
        INT4,
        ignore=[
            "lm_head",
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
        ],
    ),
    "gpt-oss": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
    "amd-mxfp4": {
        "quant_method": "quark",
        "exclude": ["lm_head", "re:.*self_attn.*"],
        "export": {"pack_method": "reorder", "kv_cache_group": []},
        "global_quant_config": {"weight": MX, "input_tensors": MX},
        "layer_quant_config": {},
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*.gate"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
    "awq": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["self_attn"],
    },
}

EXPECTED = {
    "deepseek-v3": (Layout.FP8_BLOCK, 0, True),
    "minimax-m2": (Layout.FP8_BLOCK, 0, True),
    "mixtral-fp8": (Layout.FP8_TENSOR, 0, True),
    "glm-4.6-fp8": (Layout.FP8_CHANNEL, 0, True),
    "kimi-k2-thinking": (Layout.INT4, 32, False),
    "gpt-oss": (Layout.MXFP4, 32, False),
    "amd-mxfp4": (Layout.MXFP4, 32, False),
    "modelopt": (Layout.FP8_TENSOR, 0, True),
    "gptq": (Layout.GPTQ, 128, True),
    "awq": (Layout.AWQ, 128, False),
}
"""Layout and group of an expert; whether attention projections are quantised too."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs(name):
    found = quantization_of({"quantization_config": PUBLISHED[name]})
    layout, columns, attention = EXPECTED[name]
    # gpt-oss: a stacked parameter
    expert = "model.layers.3.mlp.experts.down_proj" if name == "gpt-oss" else EXPERT
    assert (found.of(expert).layout, found.of(expert).group) == (layout, columns)
    assert found.of(Q_PROJ).is_quantised is attention
    if name not in ("deepseek-v3", "mixtral-fp8", "gptq", "awq"):
        assert not found.of("lm_head").is_quantised
    assert found.method == PUBLISHED[name]["quant_method"]
    assert found.formats == (found.of(expert),) and layout.value in str(found)


def test_modules_that_are_left_out():
    kimi = quantization_of({"quantization_config": PUBLISHED["kimi-k2-thinking"]})
    assert not kimi.of("model.layers.3.mlp.shared_experts.up_proj").is_quantised
    assert not kimi.of("model.layers.0.mlp.up_proj").is_quantised
    assert kimi.of(EXPERT).is_quantised
    minimax = quantization_of({"quantization_config": PUBLISHED["minimax-m2"]})
    assert not minimax.of("model.layers.1.block_sparse_moe.gate").is_quantised
    assert minimax.of("model.layers.1.block_sparse_moe.experts.0.w1").is_quantised
    glob = quantization_of({"quantization_config": PUBLISHED["modelopt"]})
    assert not glob.of("model.layers.3.mlp.gate").is_quantised
    assert glob.of("model.layers.3.mlp.gate_proj").is_quantised


def test_unquantised_and_other_places():
    assert str(quantization_of({})) == "unquantised"
    assert not quantization_of({}).of(EXPERT).is_quantised
    nested = {"text_config": {"quantization_config": PUBLISHED["deepseek-v3"]}}
    assert quantization_of(nested).of(EXPERT).layout is Layout.FP8_BLOCK


def test_several_formats_in_one_checkpoint():
    config = group(INT4, ignore=["lm_head"])
    config["config_groups"] = {
        "experts": {"targets": [r"re:.*\.experts\.\d+\..*"], "weights": INT4},
        "rest": {"targets": ["Linear"], "weights": FP8, "format": "float-quantized"},
        "cache": {"targets": ["LlamaAttention"], "weights": None},
    }
    found = quantization_of({"quantization_config": config})
    assert found.of(EXPERT).layout is Layout.INT4
    assert found.of(Q_PROJ).layout is Layout.FP8_CHANNEL
    dynamic = {"-:.*self_attn.*": {}, "+:.*layers\\.3\\..*": {"group_size": 32}}
    gptq = quantization_of({"quantization_config": PUBLISHED["gptq"] | {"dynamic": dynamic}})
    assert gptq.of(EXPERT).group == 32 and not gptq.of(Q_PROJ).is_quantised
    assert gptq.of(EXPERT.replace(".3.", ".4.")).group == 128


def test_modelopt_beside_the_config(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["A"]}')
    assert not read_quantization(tmp_path).formats
    facts = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    described = {"producer": {"name": "modelopt"}, "quantization": facts}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(described))
    found = read_quantization(tmp_path)
    assert found.of(EXPERT).layout is Layout.FP8_TENSOR and not found.of("lm_head").is_quantised


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, r"\[64, 64\]"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "NVFP4"),
        (group({**INT4, "num_bits": 8}), "8 bits"),
        (group({**FP8, "num_bits": 4}, "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int8"}}}, "int8"),
        (PUBLISHED["gptq"] | {"bits": 8}, "gptq with 8 bits"),
        (PUBLISHED["gptq"] | {"group_size": 7}, "groups of 7"),
        (PUBLISHED["awq"] | {"version": "gemv"}, "gemv"),
        ({"bits": 4}, "quant_method ''"),
    ],
)
def test_other_formats_are_refused_in_one_sentence(tmp_path, config, named):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    with pytest.raises(ConfigError, match=rf"not supported \(.*{named}.*\); use one in") as refusal:
        read_quantization(tmp_path)
    assert str(tmp_path) in str(refusal.value) and "\n" not in str(refusal.value)


def test_tensor_names_and_back():
    for weight in ("a.experts.3.up_proj.weight", "a.experts.gate_up_proj"):
        for suffix in SUFFIXES:
            assert weight in weight_names(tensor_name(weight, suffix))
    assert tensor_name("a.gate_up_proj", "blocks") == "a.gate_up_proj_blocks"
    assert tensor_name("a.up_proj.weight", "qweight") == "a.up_proj.qweight"
    assert tensor_name("a.up_proj.weight", "weight_scale_inv") == "a.up_proj.weight_scale_inv"


def test_parts_have_the_published_shapes():
    """[2048, 7168] is gate_proj of a DeepSeek-V3 expert and of Kimi K2's."""
    block = quantization_of({"quantization_config": PUBLISHED["deepseek-v3"]}).of(EXPERT)
    parts = block.parts(2048, 7168)
    assert parts["weight"].dtypes == ("F8_E4M3",)
    assert parts["weight_scale_inv"].shapes[0] == (16, 56)
    kimi = quantization_of({"quantization_config": PUBLISHED["kimi-k2-thinking"]}).of(EXPERT)
    parts = kimi.parts(2048, 7168)
    assert parts["weight_packed"].shapes == ((2048, 896),)
    assert parts["weight_scale"].shapes == ((2048, 224),)
    gpt = quantization_of({"quantization_config": PUBLISHED["gpt-oss"]}).of("m.experts.down_proj")
    assert (2880, 90, 16) in gpt.parts(2880, 2880)["blocks"].shapes
    awq = quantization_of({"quantization_config": PUBLISHED["awq"]}).of(EXPERT)
    assert awq.parts(2048, 7168)["qweight"].shapes == ((7168, 256),)
    assert awq.parts(2048, 7168)["qzeros"].shapes == ((56, 256),)
    gptq = quantization_of({"quantization_config": PUBLISHED["gptq"]}).of(EXPERT)
    assert gptq.parts(2048, 7168)["qweight"].shapes == ((896, 2048),)
