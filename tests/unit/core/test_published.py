"""Published layouts: every family reads them, and each side reads its own tensors."""

import json

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from afd.config.deployment import Deployment
from afd.config.resolve import check_model, replays, resolve
from afd.errors import ConfigError
from afd.models import FAMILIES, qwen3_moe, read_model
from afd.models.checkpoint import INDEX_FILE, tensor_table
from afd_demo.published.make import LAYOUTS, make_published
from afd_demo.sizes import Sizes

SIZES = Sizes(hidden=64, layers=4, experts=4, intermediate=32, heads=2, vocab=512)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_tensor_belongs_to_one_side(layout, tmp_path):
    make_published(layout, tmp_path, SIZES)
    family, model = read_model(tmp_path)
    assert (model.hidden, model.num_layers, model.num_experts) == (64, 4, 4)
    assert (model.moe_intermediate, model.dtype) == (32, "bfloat16")
    table = tensor_table(tmp_path)
    assert len({info.file for info in table.values()}) == 2
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == table.keys()
    assert index["metadata"]["total_size"] == sum(info.nbytes for info in table.values())
    experts = {name for name in table if family.is_expert_weight(name)}
    attention = {name for name in table if family.attention_name(model.architecture, name)}
    assert not experts & attention
    neither = table.keys() - experts - attention
    assert all(name.startswith(("vision_", "multi_modal", "vit_")) for name in neither)
    at = 3 if layout == "llama4" else 2  # "language_model.model.layers.0...."
    layers = {int(name.split(".")[at]) for name in experts}
    assert set(model.moe_layers) <= layers <= {*model.moe_layers, model.num_layers}
    assert any("shared_expert" in name for name in attention) <= bool(family.split)


def test_every_family_has_a_layout(tmp_path):
    names = set()
    for layout in LAYOUTS:
        make_published(layout, tmp_path / layout, SIZES)
        names.add(read_model(tmp_path / layout)[0].name)
    assert names == {family.name for family in FAMILIES}


def test_sparse_attention_on_cpus_is_limited_to_the_tokens_it_keeps(tmp_path):
    make_published("deepseek_v32", tmp_path, SIZES)
    short, long = (
        Deployment.from_plain({"model": str(tmp_path), "attention": {"max_model_len": n}})
        for n in (128, 129)
    )
    for check in (check_model, resolve):
        check(short)
        with pytest.raises(ConfigError, match=r"attends to 128 tokens \(index_topk\), which vLLM"):
            check(long)


def test_split_models_have_one_micro_batch_and_no_graphs(tmp_path):
    make_published("qwen3_next", tmp_path, SIZES)
    on_gpu = {"attention": {"device": "cuda"}, "ffn": {"device": "cuda"}}
    deployment = Deployment.from_plain({"model": str(tmp_path), **on_gpu})
    family, model = read_model(tmp_path)
    assert family.split and model.shared_intermediate == 0
    assert resolve(deployment).contract.max_depth == 1
    assert not replays(deployment, family) and replays(deployment, qwen3_moe.FAMILY)


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="layout 'gpt' is unknown; use one of qwen2_moe"):
        make_published("gpt", tmp_path, SIZES)
    with pytest.raises(ConfigError, match="format 'fp3' is unknown; use one of plain, fp8_block"):
        make_published("qwen3_moe", tmp_path, SIZES, stored_as="fp3")
