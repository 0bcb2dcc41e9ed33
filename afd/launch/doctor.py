"""`afd doctor`: what this host offers to a deployment, one line each."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import psutil

from afd.launch import rdma

PROBE_S = 120


@dataclass(frozen=True)
class Finding:
    """level: "ok"; "note" where something optional is absent; "bad" where serving cannot work."""

    level: str
    what: str
    text: str


def doctor() -> int:
    """Print every finding; returns 1 if one is bad."""
    findings = []
    for finding in itertools.chain((check() for check in CHECKS), _rdma()):
        print(f"{finding.level:4}  {finding.what:16} {finding.text}", flush=True)
        findings.append(finding)
    return 1 if any(finding.level == "bad" for finding in findings) else 0


def _python() -> Finding:
    text = f"{platform.python_version()} on {platform.machine()}, {platform.release()}"
    return Finding("ok" if sys.version_info >= (3, 10) else "bad", "python", text)


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count()
    text = f"{usable} of {present} usable"
    if usable < 2:
        return Finding("note", "cores", text + "; attention and FFN will share one core")
    return Finding("ok", "cores", text)


def _memory() -> Finding:
    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    if memory.available < 4 * 2**30:
        return Finding("note", "memory", text + "; the demo wants about 4 GiB")
    return Finding("ok", "memory", text)


def _proc_fd() -> Finding:
    """Shared memory is passed by opening /proc/PID/fd/N of a peer of the same user."""
    what = "shared memory"
    # the child is neither parent nor thread of ours, as two roles are to one another
    code = "import os, sys; os.close(os.open(f'/proc/{sys.argv[1]}/fd/{sys.argv[2]}', os.O_RDWR))"
    fd = os.memfd_create("afd-doctor")
    try:
        os.ftruncate(fd, 4096)
        argv = [sys.executable, "-S", "-c", code, str(os.getpid()), str(fd)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S)
    finally:
        os.close(fd)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:]
        text = f"/proc/PID/fd of a peer cannot be opened {reason}; set transport.backend: tcp"
        return Finding("bad", what, text)
    return Finding("ok", what, "memfd through /proc/PID/fd works")


def _comm() -> Finding:
    if importlib.util.find_spec("afd_comm") is None:
        return Finding("bad", "afd_comm", "not installed; run pip install ./comm")
    return _import("afd_comm", "import afd_comm; print('transport library loads')")


def _torch() -> Finding:
    code = (
        "import torch; cuda = torch.version.cuda;"
        "gpus = torch.cuda.device_count() if cuda else 0;"
        "print(torch.__version__, f'(CUDA {cuda}, {gpus} GPUs)' if cuda else '(CPU build)')"
    )
    return _import("torch", code)


def _vllm() -> Finding:
    return _import("vllm", "import vllm; print(vllm.__version__)")


def _import(name: str, code: str) -> Finding:
    """Import in a process of its own: it is slow, prints, and may crash."""
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code],
            capture_output=True,
            text=True,
            timeout=PROBE_S,
        )
    except subprocess.TimeoutExpired:
        return Finding("bad", name, f"import takes more than {PROBE_S} s")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding("bad", name, f"cannot be imported: {last}")
    return Finding("ok", name, done.stdout.strip().splitlines()[-1])


def _plugin() -> Finding:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if any(point.name == "afd" for point in points):
        return Finding("ok", "vllm plugin", "registered")
    text = "entry point of afd not found; install this repository with pip install -e ."
    return Finding("bad", "vllm plugin", text)


def _rdma() -> Iterator[Finding]:
    return (Finding(*facts) for facts in rdma.look())


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _cores,
    _memory,
    _proc_fd,
    _comm,
    _torch,
    _vllm,
    _plugin,
)
