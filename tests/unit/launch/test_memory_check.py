"""Memory per GPU of a deployment file, against sums by hand and against the tensors of a model."""

import math
from pathlib import Path

import pytest

from afd.config.deployment import Deployment
from afd.errors import ConfigError
from afd.models import read_model
from afd.models.checkpoint import tensor_table
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.memory_check import check_memory, gpu_uses
from afd_planner.facts.model_hf import load_model
from afd_planner.report.presets import FOLDER


def deployed(model: Path | str, gpus: int = 8, kind: str | None = "h800", **keys) -> Deployment:
    accelerators: dict[str, object] = {"count": gpus}
    if kind:
        accelerators["kind"] = kind
    hosts = [{"name": "a", "address": "10.0.0.1", "accelerators": accelerators}]
    keys.setdefault("attention", {})["device"] = "cuda"
    keys.setdefault("ffn", {})["device"] = "cuda"
    return Deployment.from_plain({"model": str(model), "hosts": hosts, **keys})


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "step3"])
def test_weights_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    make_model(family, tmp_path, resolve(family, "tiny"))
    layout, _ = read_model(tmp_path)
    sizes = {True: 0, False: 0}
    for name, info in tensor_table(tmp_path).items():
        if len(info.shape) > 1:  # norms and biases are left out: a thousandth of a large model
            sizes[layout.is_expert_weight(name)] += 2 * math.prod(info.shape)
    uses = gpu_uses(deployed(tmp_path), load_model(str(tmp_path)))
    assert uses["ffn"].weights == sizes[True]
    assert uses["attention"].weights == pytest.approx(sizes[False], rel=0.02)
    halves = gpu_uses(deployed(tmp_path, ffn={"instances": 2, "tp": 2}), load_model(str(tmp_path)))
    assert halves["ffn"].weights == sizes[True] / 4


def test_formats_and_copies_of_experts_count() -> None:
    folder = FOLDER / "deepseek-v3"
    spec = load_model(str(folder))
    plain = gpu_uses(deployed(folder, ffn={"instances": 4}), spec)["ffn"].weights
    assert plain == pytest.approx(2 * 656.6e9 / 4, rel=0.01)  # 58 layers, 257 experts of 44 M
    fp8 = gpu_uses(deployed(folder, ffn={"instances": 4, "weights": "fp8_block"}), spec)
    assert fp8["ffn"].weights == plain / 2
    more = gpu_uses(deployed(folder, ffn={"instances": 4, "redundant_experts": 64}), spec)
    assert more["ffn"].weights == pytest.approx(2 * plain, rel=0.01)


def test_a_gpu_that_is_too_small_is_one_sentence() -> None:
    folder = FOLDER / "deepseek-v3"
    with pytest.raises(ConfigError) as error:
        check_memory(deployed(folder, ffn={"instances": 4}))
    said = str(error.value)
    assert said.startswith("host a: ffn needs ") and "GiB on each h800 (weights 30" in said
    assert said.endswith(
        "set ffn.weights to fp8_block or mxfp4, use more ffn.instances or ranks, or lower"
        " attention.max_num_batched_tokens"
    )
    small = FOLDER / "qwen3-30b-a3b"
    with pytest.raises(ConfigError, match=r"KV cache 80\.0.*lower attention\.kv_cache_gib"):
        check_memory(deployed(small, attention={"kv_cache_gib": 80}, ffn={"weights": "fp8_block"}))


def test_what_cannot_be_checked_is_said() -> None:
    folder = FOLDER / "qwen3-30b-a3b"
    assert "memory not checked" in check_memory(deployed(folder, kind=None))
    assert check_memory(Deployment.from_plain({"model": str(folder)})) == ""
    fits = check_memory(deployed(folder, ffn={"weights": "fp8_block"}))
    assert fits.startswith("; memory per GPU: attention ") and fits.endswith("GiB (h800)")
