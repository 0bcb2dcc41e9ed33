"""A deployment under load, with an FFN instance killed in the middle, watched by Prometheus."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from afd.control import operator
from afd.errors import AfdError
from afd.host.package_data import data_folder
from afd.metrics import at_scrape
from afd.metrics.role import Captured, RoleMetrics
from afd.metrics.server import serve_metrics
from afd_bench.operate.panels import Panel, expanded, panels
from afd_bench.operate.prometheus import Prometheus, Series, prometheus
from afd_bench.servers import Server, disaggregated

RATE_S = 10
QUIET_S, BEFORE_S, AFTER_S = 2.0, 15.0, 20.0
_KEPT_ALERTS = {"AfdFfnLost"}
"""What killing an FFN instance makes fire within the run."""
_STREAMS = 6


@dataclass(frozen=True)
class Shown:
    """What one panel showed. series: by query, with its legend template."""

    panel: Panel
    series: tuple[tuple[str, tuple[Series, ...]], ...]

    @property
    def empty(self) -> tuple[str, ...]:
        """The queries that returned nothing but NaN."""
        return tuple(
            query.expr
            for query, (_, lines) in zip(self.panel.queries, self.series, strict=True)
            if not any(v == v for line in lines for _, v in line.points)
        )


@dataclass(frozen=True)
class Watched:
    """The result of a run. before, after: alerts that fired before and after the kill. began,
    killed_at: unix seconds."""

    shown: tuple[Shown, ...]
    before: frozenset[str]
    after: frozenset[str]
    began: float
    killed_at: float
    failed_requests: int

    @property
    def missing_alerts(self) -> set[str]:
        return _KEPT_ALERTS - self.after

    @property
    def false_alerts(self) -> frozenset[str]:
        return self.before


def watch(program: Path, folder: Path) -> Watched:
    """Runs 2A2F of the demo model for about a minute. Raises AfdError if it does not start.

    Args:
        program: Prometheus. folder: for its files.
    """
    config: dict[str, object] = {
        "model": str(data_folder("afd_launch") / "demo" / "afd-tiny-chat"),
        "attention": {
            "instances": 2,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            "kv_cache_gib": 0.25,
        },
        "ffn": {"instances": 2},
        "pipeline": {"depth": 2, "min_rows": 1, "tpot_ms": 1000},
        "transport": {"backend": "tcp"},
        "metrics": {"stage_every": 1},
    }
    with ExitStack() as stack:
        server = stack.enter_context(disaggregated(config))
        stand_in = stack.enter_context(gpu_member(folder))
        targets = {"afd": server.url.removeprefix("http://"), "stand-in": stand_in}
        found = stack.enter_context(prometheus(program, targets, folder))
        return _run(server, found)


def _run(server: Server, found: Prometheus) -> Watched:
    load = Load(server)
    start = time.time()
    time.sleep(QUIET_S)
    with load:
        time.sleep(BEFORE_S)
        before = frozenset(found.firing())
        killed_at = time.time()
        _kill(server, "ffn-1")
        seen: set[str] = set()
        while time.time() < killed_at + AFTER_S:
            seen |= found.firing()
            time.sleep(0.5)
        end = time.time()
    shown = tuple(_shown(found, panel, start, end) for panel in panels())
    return Watched(shown, before, frozenset(seen), start, killed_at, load.failed)


def _shown(found: Prometheus, panel: Panel, start: float, end: float) -> Shown:
    return Shown(
        panel,
        tuple(
            (query.legend, tuple(found.range(expanded(query.expr, RATE_S), start, end)))
            for query in panel.queries
        ),
    )


def _kill(server: Server, member: str) -> None:
    found = [m for m in operator.status(server.control).members if m.id == member]
    if not found:
        raise AfdError(f"{member} is not registered; see the deployment's log")
    os.kill(found[0].pid, signal.SIGKILL)


class Load:
    """Streams that follow one another while the block runs. failed: requests that failed."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(_STREAMS)
        ]
        self.failed = 0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, number: int) -> None:
        asked = {
            "model": self._server.model,
            "prompt": [16 + (7 * number + i) % 200 for i in range(40)],
            "max_tokens": 60,
            "ignore_eos": True,
            "stream": True,
        }
        body = json.dumps(asked).encode()
        while not self._stop.is_set():
            request = urllib.request.Request(
                f"{self._server.url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=90) as answer:
                    answer.read()
            except OSError:
                self.failed += 1
                time.sleep(0.5)


@contextmanager
def gpu_member(folder: Path) -> Iterator[str]:
    """Serves the metrics that only GPUs and RDMA ports have, with counters that grow.

    The panels about them then have data too. Yields HOST:PORT of a page with both roles' metrics.
    """
    metrics = RoleMetrics("attention")
    place = folder / "infiniband" / "mlx5_0" / "ports" / "1"
    for kind in ("counters", "hw_counters"):
        (place / kind).mkdir(parents=True)
    metrics.more.append(partial(at_scrape.rdma_ports, ("mlx5_0:1",), folder / "infiniband"))
    metrics.graph_captures[Captured.START] = 3
    server = serve_metrics(metrics)
    stop = threading.Event()

    def grow() -> None:
        count = 0
        while not stop.wait(0.2):
            count += 1
            metrics.graph_steps[1] += 20
            metrics.eager_steps["prefill"] = count
            for name in ("port_xmit_data", "port_rcv_data"):
                (place / "counters" / name).write_text(str(count * 10_000_000))
            (place / "hw_counters" / "out_of_sequence").write_text("0")

    thread = threading.Thread(target=grow, daemon=True)
    thread.start()
    try:
        yield server.url.removeprefix("http://").removesuffix("/metrics")
    finally:
        stop.set()
        thread.join()
        server.close()
