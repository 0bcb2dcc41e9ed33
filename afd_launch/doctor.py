"""`afd doctor`: what this host and this installation offer to a deployment, one line each."""

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

from afd.devices.rocm import PRODUCTS
from afd.host.amd_gpus import rocm_version
from afd_launch import pcie, rdma
from afd_launch.installation import Gpus, amd_remedy, find_gpus, vllm_build, vllm_remedy
from afd_launch.seen_gpus import BAD_GRAPHS
from attention_worker.vllm_hooks.versions import installed, refusal, warning

PROBE_S = 120


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    level: "ok"; "note" if something optional is missing; "bad" if serving cannot work.
    """

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
        return Finding("note", "memory", text + "; the demo needs about 4 GiB")
    return Finding("ok", "memory", text)


def _proc_fd() -> Finding:
    """Roles share memory by opening /proc/PID/fd/N of a peer of the same user."""
    what = "shared memory"
    # A child process stands for the peer: roles are separate processes too.
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
        return Finding("bad", "afd_comm", "not installed; run: pip install ./comm in a checkout")
    return _import("afd_comm", "import afd_comm; print('transport library loads')")


def _gpus() -> Finding:
    gpus, build = find_gpus(), vllm_build()
    names = ", ".join(f"{gpus.names.count(name)} x {name}" for name in dict.fromkeys(gpus.names))
    if gpus.kind == "amd":
        return _amd_gpus(gpus, build)
    if gpus.kind == "none":
        return Finding("note", "gpus", "none; serving uses the CPU")
    text = f"{gpus.count} usable: {names or 'nvidia-smi is missing'}"
    if build == "cpu":
        text += "; vLLM is built for CPUs: use a new environment and " + vllm_remedy(gpus)
        return Finding("note", "gpus", text)
    return Finding("ok", "gpus", text)


def _amd_gpus(gpus: Gpus, build: str | None) -> Finding:
    """AMD GPUs are at best a note: this project has not been run on any."""
    kinds = [
        f"{gpus.names.count(arch)} x {arch} ({PRODUCTS.get(arch, 'not supported')})"
        for arch in dict.fromkeys(gpus.names)
    ]
    text = f"AMD, {gpus.count} usable: {', '.join(kinds) or 'the driver lists none'}"
    release = rocm_version()
    if build != "rocm":
        text += f"; {amd_remedy()}"
    elif release and any(release in BAD_GRAPHS.get(arch, ()) for arch in gpus.names):
        text += f"; set pipeline.graphs: false with ROCm {release} (ROCm/clr issue 279)"
    else:
        text += f"; use device: rocm (ROCm {release or 'of unknown version'})"
    return Finding("note", "gpus", text + "; not verified on hardware, see docs/amd.md")


def _torch() -> Finding:
    code = (
        "import torch; build = torch.version;"
        "kind = f'ROCm {build.hip}' if build.hip else f'CUDA {build.cuda}' if build.cuda else '';"
        "gpus = torch.cuda.device_count() if kind else 0;"
        "print(torch.__version__, f'({kind}, {gpus} GPUs)' if kind else '(CPU build)')"
    )
    return _import("torch", code)


def _vllm() -> Finding:
    build = vllm_build()
    if build is None:
        return Finding("bad", "vllm", f"not installed; {vllm_remedy(find_gpus())}")
    found = _import("vllm", f"import vllm; print(vllm.__version__, '(for {build})')")
    version = vllm_version()
    if found.level != "ok" or version is None:
        return found
    return Finding(version.level, "vllm", f"{found.text}: {version.text}")


def vllm_version() -> Finding | None:
    """A finding if the installed vLLM was not tested, or is known not to work."""
    vllm = installed()
    if vllm is None:
        return None
    if (refused := refusal(vllm)) is not None:
        return Finding("bad", "vllm version", refused)
    untested = warning(vllm)
    return None if untested is None else Finding("note", "vllm version", untested)


def _import(name: str, code: str) -> Finding:
    """Run ``code``, an import, in another process: it is slow, prints, and may crash."""
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
    text = "afd's entry point is missing, so vLLM does not load it; reinstall afd"
    return Finding("bad", "vllm plugin", text)


def _rdma() -> Iterator[Finding]:
    yield from (Finding(*facts) for facts in rdma.look())
    gpus = pcie.read_gpus()
    for number, near in enumerate(pcie.nearest_ports(gpus, rdma.read_ports())):
        level = "ok" if near else "note"
        yield Finding(level, f"gpu {number}", pcie.describe(number, gpus[number], near))


CHECKS: tuple[Callable[[], Finding], ...] = (
    _python,
    _cores,
    _memory,
    _proc_fd,
    _comm,
    _gpus,
    _torch,
    _vllm,
    _plugin,
)
