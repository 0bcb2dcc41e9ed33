"""Metrics that are read when a page is scraped: time budget, transport threads, RDMA ports.

Each function returns families for ``RoleMetrics.more``.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_THREADS = Path("/proc/self/task")
_INFINIBAND = Path("/sys/class/infiniband")
# Counters of a port in sysfs: file, then the label `direction`. The files count words of 4 bytes.
_WORDS = (("port_xmit_data", "sent"), ("port_rcv_data", "received"))
# Below counters/ (InfiniBand) and hw_counters/ (the vendor's): what says that a link is in trouble.
_EVENTS = (
    "symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards", "port_xmit_wait",
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err",
    "np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets",
)  # fmt: skip


def budget(target_s: float, layers: int, depth: int) -> Iterator[Metric]:
    """Yields the target time per output token and the time that each stage may take.

    A step has ``layers * depth`` micro-batches of one layer. A stage that takes longer than
    ``target_s / (layers * depth)`` for one of them misses the target by itself, whatever the others
    do (Step-3 report, section 5: each stage gets the same period).
    """
    from prometheus_client.core import GaugeMetricFamily

    yield GaugeMetricFamily(
        "afd_tpot_target_seconds", "Target time per output token, pipeline.tpot_ms.", value=target_s
    )
    stages = GaugeMetricFamily(
        "afd_stage_budget_seconds",
        "Longest time of one micro-batch of one layer in a stage that meets the target.",
        labels=["stage"],
    )
    for stage in ("attention", "a2f", "ffn", "f2a"):
        stages.add_metric([stage], target_s / (layers * depth))
    yield stages


def threads(folder: Path = _THREADS) -> Iterator[Metric]:
    """Yields the processor time of the transport's threads, which are named afd-*."""
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "afd_transport_thread_cpu_seconds",
        "Processor time of the transport's threads.",
        labels=["thread"],
    )
    seconds: dict[str, float] = {}
    for task in folder.iterdir():
        try:
            name = (task / "comm").read_text().strip()
            if not name.startswith("afd-"):
                continue
            fields = (task / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # the thread has ended meanwhile
            continue
        ticks = int(fields[11]) + int(fields[12])  # utime and stime, fields 14 and 15 of stat
        seconds[name] = seconds.get(name, 0.0) + ticks / os.sysconf("SC_CLK_TCK")
    for name, value in sorted(seconds.items()):
        family.add_metric([name.removeprefix("afd-")], value)
    yield family


def processor(task: Path | None = None) -> Iterator[Metric]:
    """Yields the time of the thread that runs the steps, on a core and ready but without one.

    task: its folder; by default the main thread's, which runs the steps of both roles. Other
    threads are left out: they wait at times when no step needs them, and a sum over threads falls
    when one ends.
    """
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "afd_step_thread_seconds",
        "Time of the thread that runs the steps, on a core and in the run queue.",
        labels=["state"],
    )
    task = _THREADS / str(os.getpid()) if task is None else task
    with contextlib.suppress(OSError, ValueError):  # a kernel without schedstat
        running, waiting, _ = (task / "schedstat").read_text().split()
        family.add_metric(["running"], int(running) / 1e9)
        family.add_metric(["waiting"], int(waiting) / 1e9)
    yield family


def rdma_ports(ports: Sequence[str], folder: Path = _INFINIBAND) -> Iterator[Metric]:
    """Yields the counters of RDMA ports. ports: such as ``mlx5_0:1``; port 1 if none is named.

    The counters are the port's: several members of a host that share it show the same numbers.
    """
    from prometheus_client.core import CounterMetricFamily

    moved = CounterMetricFamily(
        "afd_rdma_port_bytes",
        "Bytes of an RDMA port, from its own counters.",
        labels=["host", "port", "direction"],
    )
    events = CounterMetricFamily(
        "afd_rdma_port_events",
        "Events of an RDMA port that hint at a bad link or at congestion.",
        labels=["host", "port", "event"],
    )
    host = socket.gethostname()
    for port in ports:
        device, _, number = port.partition(":")
        place = folder / device / "ports" / (number or "1")
        for name, direction in _WORDS:
            if (words := _number(place / "counters" / name)) is not None:
                moved.add_metric([host, port, direction], words * 4)
        for name in _EVENTS:
            for kind in ("counters", "hw_counters"):
                if (count := _number(place / kind / name)) is not None:
                    events.add_metric([host, port, name], count)
                    break
    yield moved
    yield events


def _number(path: Path) -> int | None:
    """The counter in a file of sysfs; None if the port does not have it."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
