"""Shapes of attention tensors that do not fit the others are found from the headers."""

from pathlib import Path

import pytest

from afd.models import read_model
from afd.models.checkpoint import TensorInfo, tensor_table
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.tensor_shapes import odd_tensor

FILE = Path("model.safetensors")
HIDDEN = 64


def table(**odd: tuple[int, ...]) -> dict[str, TensorInfo]:
    """Four layers of three tensors. odd: "k_proj_2": shape of that tensor in layer 2."""
    shapes = {
        "self_attn.k_proj.weight": (32, HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
        "mlp.experts.0.up_proj.weight": (16, HIDDEN),
    }
    found = {}
    for layer in range(4):
        for suffix, shape in shapes.items():
            short = f"{suffix.split('.')[-2]}_{layer}"
            name = f"model.layers.{layer}.{suffix}"
            found[name] = TensorInfo(FILE, "BF16", odd.get(short, shape), 0, 0)
    return found


def judged(**odd: tuple[int, ...]) -> str | None:
    return odd_tensor(table(**odd), lambda name: ".experts." in name, HIDDEN)


def test_alike_layers_are_good() -> None:
    assert judged() is None


def test_the_odd_layer_is_named() -> None:
    said = judged(k_proj_2=(24, HIDDEN))
    assert said is not None and "layers.2.self_attn.k_proj.weight in model.safetensors" in said
    assert "has shape [24, 64], but it has [32, 64] in 3 other layers" in said


def test_a_norm_has_the_hidden_size() -> None:
    every = {f"input_layernorm_{layer}": (48,) for layer in range(4)}
    assert "has shape [48], but config.json asks for [64]" in (judged(**every) or "")


def test_kinds_of_layers_may_differ_and_experts_are_checked_elsewhere() -> None:
    assert judged(k_proj_0=(24, HIDDEN), k_proj_1=(24, HIDDEN)) is None
    assert judged(up_proj_1=(8, HIDDEN)) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "step3"])
def test_whole_checkpoints_are_good(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_model(name, folder, resolve(name, "tiny"))
    family, model = read_model(folder)
    assert odd_tensor(tensor_table(folder), family.is_expert_weight, model.hidden) is None
