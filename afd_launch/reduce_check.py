"""All-reduce inside this host, with the collectives of an FFN instance of several ranks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

from afd.devices import device_named
from afd.errors import AfdError
from afd_launch.findings import Measured, Row
from afd_launch.gpu_facts import scale_up_gbytes
from afd_launch.installation import find_gpus

CHECK_S = 300
_SHARE = 0.4  # of the links' data sheet rate, per direction
_CPU_RANKS = 2
REMEDY = "see `afd doctor`; with NCCL_DEBUG=INFO the log of the ranks names the link"


def measure(device: str, seconds: float) -> list[Measured] | Row:
    """Times all-reduces of all GPUs of this host, or of two processes on its CPU.

    Args:
        device: a name of :data:`afd.devices.DEVICES`. seconds: what each size takes, about.

    Returns: what was measured, or a line that says why nothing was.

    Raises:
        AfdError: a rank failed, or a sum is wrong.
    """
    on_cpu = device_named(device).host_memory
    ranks = _CPU_RANKS if on_cpu else find_gpus().count
    if ranks < 2:
        return Row("note", "all-reduce", "one GPU: not measured", "two GPUs", "none is needed")
    if importlib.util.find_spec("torch") is None:
        return Row("note", "all-reduce", "not measured", "torch", "install torch to measure it")
    argv = [sys.executable, "-m", "afd_launch.reduce_ranks_torch", device, str(ranks), str(seconds)]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=CHECK_S)
    except subprocess.TimeoutExpired:
        raise AfdError(f"all-reduce of {ranks} ranks: not done within {CHECK_S} s") from None
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise AfdError(f"all-reduce of {ranks} ranks failed: {last}")
    said = json.loads(lines[-1])
    if not said["right"]:
        raise AfdError(f"all-reduce of {ranks} ranks gave a wrong sum")
    link = None if on_cpu else scale_up_gbytes()
    limit = None if link is None else _SHARE * link
    note = f"{ranks} ranks, {said['backend']}, {said['large'] >> 20} MiB"
    # Bytes that each rank's link carries at least, per byte of the result: 2 (n - 1) / n.
    bus = 2 * (ranks - 1) / ranks * said["large"]
    rates = tuple(bus / one / 1e9 for one in said["large_s"])
    times = tuple(one * 1e6 for one in said["small_s"])
    return [
        Measured("all_reduce_gbytes", "all-reduce", rates, limit, note),
        Measured("all_reduce_us", "all-reduce", times, None, f"{said['small'] >> 10} KiB"),
    ]
