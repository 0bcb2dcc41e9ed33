"""What attention instances read: quantised weights decoded for CPUs, as stored for GPUs."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch
from safetensors.torch import load_file

from afd.config.deployment import Deployment
from afd.config.roles import RoleSpec
from afd.models import read_config, read_model
from afd.models.checkpoint import tensor_table
from afd_demo.published.make import make_published
from afd_demo.sizes import Sizes
from attention_worker.quantised_linears import attention_is_quantised
from attention_worker.stored_weights import AttentionTensors
from attention_worker.vllm_hooks.command import attention_command, unquantised

STORED = [
    ("deepseek_v3", "fp8_block", True),
    ("glm4_moe", "fp8_channel", True),
    ("qwen3_moe", "fp8_tensor", True),
    ("qwen3_moe", "gptq", True),
    ("qwen3_moe", "gptq_ordered", True),
    ("qwen3_moe", "awq", True),
    ("qwen3_moe", "int4_all", True),
    ("deepseek_v3", "mxfp4_quark", True),
    ("kimi_k2", "int4", False),
    ("gpt_oss", "mxfp4", False),
]
"""Layout, format, and whether attention is quantised too."""
SIZES = Sizes(hidden=128, layers=2, experts=2, intermediate=64, heads=4, vocab=512)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("stored")
    for layout, stored_as, _ in STORED:
        name = f"{layout}-{stored_as}"
        twin = root / f"{name}-twin"
        make_published(layout, root / name, SIZES, stored_as=stored_as, twin=twin)
    for layout in ("llama4", "step3_vl"):
        make_published(layout, root / layout, SIZES)
    return root


@pytest.mark.parametrize(("layout", "stored_as", "quantised"), STORED)
def test_decoded_attention_equals_the_unquantised_twin(folder, layout, stored_as, quantised):
    path, twin = folder / f"{layout}-{stored_as}", folder / f"{layout}-{stored_as}-twin"
    assert attention_is_quantised(path) is quantised and not attention_is_quantised(twin)
    tensors = AttentionTensors(path, decoding=True)
    found, wanted = dict(tensors), dict(AttentionTensors(twin, decoding=False))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name].float(), wanted[name].float()) for name in found)
    assert (tensors.decoded > 0) is quantised and bool(tensors.formats) is quantised


@pytest.mark.parametrize(("layout", "stored_as", "quantised"), STORED)
def test_tensors_are_read_as_stored_for_readers_of_vllm(folder, layout, stored_as, quantised):
    path = folder / f"{layout}-{stored_as}"
    family, _ = read_model(path)
    tensors = AttentionTensors(path, decoding=False)
    found, table = dict(tensors), tensor_table(path)
    drafts = dict(AttentionTensors(path, decoding=False, drafts=True))
    wanted = {name for name in table if not family.is_expert_weight(name)}
    behind = f"model.layers.{SIZES.layers}."  # only GLM has a draft layer here
    assert drafts.keys() == {name for name in wanted if name.startswith(behind)}
    assert bool(drafts) is (layout == "glm4_moe")
    assert found.keys() == wanted - drafts.keys()
    assert tensors.bytes_read == sum(table[name].nbytes for name in found)


def test_image_encoders_are_not_read(folder):
    for layout, dropped in (("llama4", "language_model."), ("step3_vl", "")):
        names = dict(AttentionTensors(folder / layout, decoding=True)).keys()
        assert all(name.startswith(("model.", "lm_head.")) for name in names)
        files = [load_file(file) for file in sorted((folder / layout).glob("*.safetensors"))]
        stored = {name.removeprefix(dropped) for file in files for name in file}
        assert names < stored and "vision_model.layernorm_post.weight" in stored - names


@pytest.mark.parametrize(("device", "kept"), [("cpu", False), ("cuda", True)])
def test_vllm_keeps_the_quantisation_where_it_has_kernels(folder, device, kept, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    def overrides(name):
        plain = {"model": str(folder / name), "attention": {"device": device}}
        plain["ffn"] = {"device": device}
        role = RoleSpec("attention", 0, Deployment.from_plain(plain), "tcp://127.0.0.1:1")
        argv, _ = attention_command(role)
        return [arg for arg in argv if arg.startswith("--hf-overrides")]

    nulled = ['--hf-overrides={"quantization_config": null}']
    assert overrides("deepseek_v3-fp8_block") == ([] if kept else nulled)
    assert overrides("gpt_oss-mxfp4") == nulled  # only its experts are quantised
    assert overrides("step3_vl") == []


def test_every_place_of_a_quantisation_is_overridden(folder):
    assert unquantised(read_config(folder / "llama4"), quantised=False) == []
    nested = {"text_config": {"quantization_config": {"quant_method": "fp8"}}}
    assert unquantised(nested, quantised=True) == [
        '--hf-overrides={"text_config": {"quantization_config": null}}'
    ]
    for config in ({"compression_config": {}, "quantization_config": {"a": 1}}, {}):
        assert unquantised(config, quantised=True) == [
            '--hf-overrides={"quantization_config": null}'
        ]
