"""Metrics read at a scrape: threads, run queue, RDMA ports, time budget; and the probes."""

import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from afd.metrics import at_scrape
from afd.metrics.role import RoleMetrics
from afd.metrics.server import serve_metrics


def values(*families: Metric) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def test_budget_divides_the_target_over_the_micro_batches() -> None:
    found = values(*at_scrape.budget(0.05, layers=60, depth=3))
    assert found["afd_tpot_target_seconds",] == 0.05
    assert found["afd_stage_budget_seconds", "ffn"] == pytest.approx(0.05 / 180)


def test_a_busy_thread_counts_as_running() -> None:
    task = Path(f"/proc/self/task/{threading.get_native_id()}")

    def spent() -> dict[tuple[str, ...], float]:
        return values(*at_scrape.processor(task))

    before, ends = spent(), time.monotonic() + 0.3
    while time.monotonic() < ends:
        pass
    ran, waited = (after - before[key] for key, after in sorted(spent().items()))
    assert ran + waited > 0.2 and waited >= 0
    assert values(*at_scrape.processor()).keys() == before.keys(), "the main thread's"
    assert not values(*at_scrape.processor(task / "absent")), "a kernel without schedstat"


def test_threads_of_the_transport_are_told_by_their_names(tmp_path: Path) -> None:
    for number, name in (("7", "afd-tcp"), ("8", "afd-tcp"), ("9", "python")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "comm").write_text(name + "\n")
        stat = f"{number} ({name}) S " + " ".join(["0"] * 10) + " 250 50 " + " ".join(["0"] * 30)
        (tmp_path / number / "stat").write_text(stat)
    found = values(*at_scrape.threads(tmp_path))
    assert found == {("afd_transport_thread_cpu_seconds_total", "tcp"): 6.0}


def test_counters_of_a_port_come_from_sysfs(tmp_path: Path) -> None:
    for kind, name, text in (
        ("counters", "port_xmit_data", "1000\n"),
        ("counters", "symbol_error", "3\n"),
        ("hw_counters", "out_of_sequence", "5\n"),
        ("counters", "link_downed", "no number"),
    ):
        place = tmp_path / "mlx5_0" / "ports" / "1" / kind
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    found = {(key[0], *key[2:]): value for key, value in values(
        *at_scrape.rdma_ports(("mlx5_0", "absent:1"), tmp_path)
    ).items()}  # fmt: skip
    assert found == {
        ("afd_rdma_port_bytes_total", "mlx5_0", "sent"): 4000,
        ("afd_rdma_port_events_total", "mlx5_0", "symbol_error"): 3,
        ("afd_rdma_port_events_total", "mlx5_0", "out_of_sequence"): 5,
    }


def test_a_role_is_ready_once_it_says_so() -> None:
    metrics = RoleMetrics("ffn")
    server = serve_metrics(metrics)
    base = server.url.removesuffix("/metrics")
    try:
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{base}/ready", timeout=5)
        assert urllib.request.urlopen(f"{base}/live", timeout=5).status == 200
        metrics.ready = True
        assert urllib.request.urlopen(f"{base}/ready", timeout=5).status == 200
    finally:
        server.close()
