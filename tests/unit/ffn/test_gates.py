"""Gated shared experts (Qwen2-MoE) and router weights on the input (Llama 4)."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")

import torch.nn.functional as F  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.models import read_model  # noqa: E402
from afd_demo.published.make import make_published  # noqa: E402
from afd_demo.sizes import Sizes  # noqa: E402
from ffn_worker.experts.build import load_ffn_model  # noqa: E402

SIZES = Sizes(hidden=64, layers=2, experts=4, intermediate=32, heads=2, vocab=512)


def made(layout, folder):
    make_published(layout, folder, SIZES, dtype="float32")
    tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def outputs(folder, layer, x, ids, weights, instances):
    family, model = read_model(folder)
    return sum(
        load_ffn_model(
            folder, family, model, instances=instances, index=index, backend="reference"
        ).forward(layer, x, ids, weights)
        for index in range(instances)
    )


def mlp(tensors, prefix, x):
    gate, up, down = (tensors[f"{prefix}{name}_proj.weight"] for name in ("gate", "up", "down"))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


@pytest.mark.parametrize("instances", [1, 2])
def test_the_gate_scales_the_shared_expert(tmp_path, instances):
    tensors = made("qwen2_moe", tmp_path)
    x, prefix = torch.randn(5, 64), "model.layers.1.mlp."
    ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2]], dtype=torch.int32)
    weights = torch.rand(5, 2)
    gate = F.linear(x, tensors[f"{prefix}shared_expert_gate.weight"]).sigmoid()
    wanted = gate * mlp(tensors, f"{prefix}shared_expert.", x)
    for row in range(5):
        for k in range(2):
            expert = f"{prefix}experts.{ids[row, k]}."
            wanted[row] += weights[row, k] * mlp(tensors, expert, x[row])
    torch.testing.assert_close(outputs(tmp_path, 1, x, ids, weights, instances), wanted)


def test_a_missing_gate_is_named(tmp_path):
    made("qwen2_moe", tmp_path)
    family, model = read_model(tmp_path)
    name = b"layers.0.mlp.shared_expert_gate"
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes().replace(name, name[:-1] + b"_"))
    with pytest.raises(ConfigError, match=r"no tensor model.layers.0.mlp.shared_expert_gate"):
        load_ffn_model(tmp_path, family, model, instances=1, index=0)


@pytest.mark.parametrize("instances", [1, 2])
def test_the_router_weight_scales_the_input(tmp_path, instances):
    tensors = made("llama4", tmp_path)
    x, prefix = torch.randn(6, 64), "language_model.model.layers.1.feed_forward."
    ids = torch.tensor([[0], [1], [2], [3], [1], [2]], dtype=torch.int32)
    weights = torch.rand(6, 1)
    wanted = mlp(tensors, f"{prefix}shared_expert.", x)
    for row, expert in enumerate(ids[:, 0].tolist()):
        gate, up = (x[row] * weights[row] @ tensors[f"{prefix}experts.gate_up_proj"][expert]).chunk(
            2
        )
        wanted[row] += (F.silu(gate) * up) @ tensors[f"{prefix}experts.down_proj"][expert]
    torch.testing.assert_close(outputs(tmp_path, 1, x, ids, weights, instances), wanted)
