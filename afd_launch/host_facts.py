"""What a host is: for the comparison of two hosts, and of a container with bare metal."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from pathlib import Path

from afd.host.amd_gpus import rocm_version
from afd_launch.findings import Row
from afd_launch.installation import find_gpus
from afd_launch.rdma import DEVICES, devices_openable, read_ports
from afd_launch.versions import installed_versions

Facts = Mapping[str, str]

_NVIDIA = Path("/proc/driver/nvidia/version")
_AMD = Path("/sys/module/amdgpu/version")
_SHARED_MEMORY = Path("/dev/shm")
_REMEDIES = {
    "model": "copy the checkpoint again; the files differ",
    "nvidia driver": "install the same driver on both hosts",
    "amd driver": "install the same driver on both hosts",
    "kernel": "no need to act unless RDMA fails; drivers are built per kernel",
    "locked memory": "set the limit as on the other host: LimitMEMLOCK=infinity, or ulimit -l",
    "container": "run both sides in the same way, so that limits and devices are the same",
}
_NOTES = ("kernel", "container")
"""Differences that are worth a look but end nothing."""


def facts_of_this_host(model: Path | None) -> dict[str, str]:
    """What two hosts of a deployment should share. model: a checkpoint; None: not compared.

    Raises:
        ConfigError: the checkpoint cannot be read.
    """
    found = {
        **installed_versions(),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "kernel": platform.release(),
        "locked memory": _locked(),
        "container": "yes" if in_container() else "no",
    }
    if _NVIDIA.exists():
        words = _NVIDIA.read_text().splitlines()[0].split("Kernel Module")[-1].split()
        found["nvidia driver"] = next((w for w in words if w[:1].isdigit()), "unknown")
    if _AMD.exists():
        found["amd driver"] = _AMD.read_text().strip()
    if (rocm := rocm_version()) is not None:
        found["rocm"] = rocm
    if model is not None:
        from afd.models.checkpoint import fingerprint

        found["model"] = fingerprint(model)[:16]
    return found


def _locked() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "unlimited" if soft == resource.RLIM_INFINITY else f"{soft >> 10} KiB"


def in_container() -> bool:
    """Whether this process says that it runs in one: Docker, Podman and Kubernetes do."""
    marks = (Path("/.dockerenv"), Path("/run/.containerenv"))
    return any(mark.exists() for mark in marks) or "KUBERNETES_SERVICE_HOST" in os.environ


def compared(near: Facts, far: Facts) -> list[Row]:
    """One row per fact that a side has, by the near side's value. Pure."""
    rows = []
    for what in sorted(near.keys() | far.keys()):
        here, there = near.get(what, "absent"), far.get(what, "absent")
        if what == "model" and "absent" in (here, there):
            rows.append(Row("note", what, "not compared", "the same", "give --model on both sides"))
            continue
        level = "ok" if here == there else "note" if what in _NOTES else "bad"
        remedy = _REMEDIES.get(what, f"install the same {what} on both hosts")
        text = here if here == there else f"{here} here, {there} there"
        rows.append(Row(level, what, text, "the same", "" if level == "ok" else remedy))
    return rows


# -- a container beside bare metal

_ROOM_REMEDIES = {
    "cores": "give the container all cores: no --cpus and no --cpuset-cpus",
    "gpus": "give the container all GPUs: --gpus all, or --device /dev/kfd --device /dev/dri",
    "rdma ports": f"give the container --device {DEVICES} and the host's network (--network host)",
    "/dev/shm MiB": "give the container the host's IPC (--ipc host), or a larger --shm-size",
    "locked MiB": "give the container --ulimit memlock=-1 (Kubernetes: IPC_LOCK)",
}


def room_of_this_host() -> dict[str, float]:
    """What a container can take away. -1: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    ports = [port for port in read_ports() if port.state == "ACTIVE"]
    shared = shutil.disk_usage(_SHARED_MEMORY).total / 2**20 if _SHARED_MEMORY.exists() else 0.0
    return {
        "cores": float(len(os.sched_getaffinity(0))),
        "gpus": float(find_gpus().count),
        "rdma ports": float(len(ports) if devices_openable() else 0),
        "/dev/shm MiB": float(round(shared)),
        "locked MiB": -1.0 if soft == resource.RLIM_INFINITY else float(soft >> 20),
    }


_ENOUGH_SHARED = 1024.0  # MiB; vLLM and NCCL use it. Docker gives 64


def room_compared(bare: Mapping[str, float], here: Mapping[str, float]) -> list[Row]:
    """One line per thing of which a container has less than bare metal, or one for all. Pure."""
    rows = []
    for what, remedy in _ROOM_REMEDIES.items():
        had, has = bare.get(what, 0.0), here.get(what, 0.0)
        enough = what == "/dev/shm MiB" and has >= _ENOUGH_SHARED
        if _comparable(has) < _comparable(had) and not enough:
            text = f"{_amount(has)} here, {_amount(had)} on bare metal"
            rows.append(Row("bad", what, text, "at least as much", remedy))
    return rows or [Row("ok", "room", ", ".join(_ROOM_REMEDIES), "as on bare metal")]


def _comparable(value: float) -> float:
    return float("inf") if value < 0 else value


def _amount(value: float) -> str:
    return "no limit" if value < 0 else f"{value:g}"
