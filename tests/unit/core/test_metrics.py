"""afd.metrics.role: the hot-path histogram against a plain one, and the exported metrics."""

from __future__ import annotations

import json
import random
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from fake_trace import FakeTrace
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from afd.errors import ConfigError
from afd.metrics import at_scrape
from afd.metrics.role import (
    SECONDS_BOUNDS,
    Captured,
    Direction,
    RoleCollector,
    RoleMetrics,
    Stage,
    StageHistogram,
    Weights,
)
from afd.metrics.server import serve_metrics
from afd_bench.operate.alerts import ALERTS, RECORDED
from afd_bench.operate.files import texts
from afd_gateway.telemetry import GATEWAY_METRICS

ROOT = Path(__file__).parents[3]
DASHBOARDS = sorted((ROOT / "afd_launch/data/dashboards/grafana").glob("*.json"))

# Exported only where a host has RDMA ports and a process has threads of the transport.
OF_THE_HOST = (
    "afd_rdma_port_bytes_total",
    "afd_rdma_port_events_total",
    "afd_transport_thread_cpu_seconds_total",
)
# vLLM metrics that the dashboard and docs/metrics.md use, with the names in vLLM's source: counters
# without _total, histograms without _bucket, _sum and _count.
VLLM_METRICS = {
    "vllm:time_to_first_token_seconds",
    "vllm:request_time_per_output_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:num_preemptions",
}
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")


def reference_counts(bounds: tuple[float, ...], values: list[float]) -> list[int]:
    """Returns counts per bucket, computed from the definition."""
    edges = (float("-inf"), *bounds, float("inf"))
    return [sum(low < value <= high for value in values) for low, high in pairwise(edges)]


def families(metrics: RoleMetrics) -> dict[str, object]:
    registry = CollectorRegistry()
    registry.register(RoleCollector(metrics))
    text = generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(metrics: RoleMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families(metrics).values()
        for sample in family.samples
    }


def exported_names() -> set[str]:
    """Returns the sample names of all metrics of a deployment, including the gateway's."""
    made = [RoleMetrics("attention"), RoleMetrics("ffn")]
    made[0].graph_steps[1] = 1  # exported only after a GPU has replayed a step
    made[0].eager_steps["prefill"] = 1
    made[0].more = [
        partial(at_scrape.budget, 0.05, 4, 3),
        at_scrape.threads,
        at_scrape.processor,
        partial(at_scrape.rdma_ports, ("mlx5_0:1",)),
    ]
    made[1].graph_captures[Captured.START] = 1
    made[0].decode_depths = lambda: ((8, 2),)
    for now in (0.0, 0.5):
        made[0].decode_steps.begin(5, 2, now, decode=True)
    made[1].expert_rows = lambda: {3: [0, 7]}
    for metrics in made:
        metrics.wire_traces["peer-0"] = FakeTrace()
    roles = {name for metrics in made for name, _ in samples(metrics)}
    return roles | set(GATEWAY_METRICS) | set(OF_THE_HOST)


@pytest.mark.parametrize("seed", range(5))
def test_histogram_equals_the_definition(seed: int) -> None:
    rng = random.Random(seed)
    values = [10 ** rng.uniform(-6, 2) for _ in range(500)]
    values += [rng.choice(SECONDS_BOUNDS) for _ in range(50)]  # exactly on a bound
    histogram = StageHistogram()
    for value in values:
        histogram.observe(value)
    snap = histogram.snapshot()
    assert list(snap.counts) == reference_counts(SECONDS_BOUNDS, values)
    assert snap.count == len(values)
    assert snap.total == pytest.approx(sum(values))


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_negative_or_undefined_value_counts_as_zero(value: float) -> None:
    histogram = StageHistogram()
    histogram.observe(value)
    assert histogram.snapshot().counts[0] == 1
    assert histogram.snapshot().total == 0.0


def test_histogram_refuses_unordered_bounds() -> None:
    with pytest.raises(ValueError, match="strictly increasing"):
        StageHistogram((1.0, 1.0))
    with pytest.raises(ValueError, match="strictly increasing"):
        StageHistogram(())


def test_snapshot_is_consistent_while_another_thread_observes() -> None:
    histogram = StageHistogram()
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            histogram.observe(1e-3)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        counts = [histogram.snapshot().count for _ in range(200)]
    finally:
        stop.set()
        thread.join()
    assert counts == sorted(counts)


def test_ffn_scrape() -> None:
    metrics = RoleMetrics("ffn", slots=6)
    metrics.stage(Stage.FFN).observe(0.002)
    metrics.stage(Stage.FFN).observe(0.02)
    metrics.rows_per_ffn_call.observe(48)
    metrics.wire_bytes[Direction.F2A] += 4096
    metrics.bubble_seconds += 1.5
    metrics.steps[3] += 7
    metrics.slots_in_flight = 2
    metrics.peers_up = 2
    metrics.late_peers += 1
    metrics.expert_rows = lambda: {3: [0, 7]}
    metrics.weights_read_bytes[Weights.EXPERT] = 123
    metrics.weights_held_bytes[Weights.EXPERT] = 456
    got = samples(metrics)
    assert got["afd_stage_seconds_bucket", (("le", "0.0025"), ("stage", "ffn"))] == 1
    assert got["afd_stage_seconds_bucket", (("le", "+Inf"), ("stage", "ffn"))] == 2
    assert got["afd_stage_seconds_count", (("stage", "ffn"),)] == 2
    assert got["afd_stage_seconds_sum", (("stage", "ffn"),)] == pytest.approx(0.022)
    assert got["afd_stage_seconds_count", (("stage", "a2f"),)] == 0  # exported before first use
    assert ("afd_stage_seconds_count", (("stage", "attention"),)) not in got
    assert got["afd_rows_per_ffn_call_bucket", (("le", "32.0"),)] == 0
    assert got["afd_rows_per_ffn_call_bucket", (("le", "64.0"),)] == 1
    assert got["afd_wire_bytes_total", (("direction", "f2a"),)] == 4096
    assert got["afd_bubble_seconds_total", (("side", "ffn"),)] == 1.5
    assert got["afd_steps_total", (("depth", "3"),)] == 7
    assert got["afd_steps_total", (("depth", "1"),)] == 0
    assert got["afd_slots", ()] == 6
    assert got["afd_slots_in_flight", ()] == 2
    assert got["afd_peers_up", (("role", "attention"),)] == 2
    assert got["afd_late_peers_total", ()] == 1
    expert = (("expert", "1"), ("layer", "3"))
    assert {key: n for key, n in got.items() if key[0] == "afd_expert_rows_total"} == {
        ("afd_expert_rows_total", expert): 7
    }
    assert got["afd_weights_read_bytes", (("kind", "expert"),)] == 123
    assert got["afd_weights_held_bytes", (("kind", "expert"),)] == 456
    assert got["afd_weights_held_bytes", (("kind", "attention"),)] == 0


def test_attention_scrape() -> None:
    metrics = RoleMetrics("attention")
    metrics.stage(Stage.ATTENTION).observe(0.004)
    metrics.wire_bytes[Direction.A2F] += 10
    metrics.ffn_retries["lost"] += 3
    got = samples(metrics)
    assert got["afd_stage_seconds_count", (("stage", "attention"),)] == 1
    assert got["afd_stage_seconds_count", (("stage", "f2a"),)] == 0
    assert got["afd_wire_bytes_total", (("direction", "a2f"),)] == 10
    assert got["afd_ffn_retries_total", (("cause", "lost"),)] == 3
    assert got["afd_ffn_retries_total", (("cause", "rejoined"),)] == 0
    assert got["afd_peers_up", (("role", "ffn"),)] == 0
    names = {name for name, _ in got}
    assert "afd_late_peers_total" not in names
    assert "afd_rows_per_ffn_call_count" not in names


def test_a_stage_of_the_other_role_appears_once_observed() -> None:
    metrics = RoleMetrics("attention")
    metrics.stage(Stage.A2F).observe(1e-4)
    assert samples(metrics)["afd_stage_seconds_count", (("stage", "a2f"),)] == 1


def test_served_over_http_on_any_port() -> None:
    metrics = RoleMetrics("ffn", slots=2)
    server = serve_metrics(metrics)
    try:
        assert re.fullmatch(r"http://127\.0\.0\.1:[1-9]\d*/metrics", server.url)
        metrics.steps[1] += 1
        with urllib.request.urlopen(server.url, timeout=5) as answer:
            text = answer.read().decode()
        assert 'afd_steps_total{depth="1"} 1.0' in text
        port = int(server.url.rsplit(":", 1)[1].split("/")[0])
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1.*use port 0"):
            serve_metrics(metrics, port=port)
    finally:
        server.close()
    with pytest.raises(OSError):
        urllib.request.urlopen(server.url, timeout=1)


def test_an_idle_connection_ends_and_frees_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("afd.metrics.server._Silent.timeout", 0.2)
    server = serve_metrics(RoleMetrics("ffn", slots=1))
    try:
        address = ("127.0.0.1", int(server.url.split(":")[2].partition("/")[0]))
        before = threading.active_count()
        for sent in (b"", b"GET /metrics"):
            with socket.create_connection(address, timeout=5) as idle:
                idle.sendall(sent)
                assert idle.recv(1) == b""
        end = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() <= before
    finally:
        server.close()


def test_a_wildcard_address_is_not_advertised() -> None:
    server = serve_metrics(RoleMetrics("ffn"), host="0.0.0.0", advertise="127.0.0.1")
    try:
        assert server.url.startswith("http://127.0.0.1:")
    finally:
        server.close()


def test_import_is_light() -> None:
    heavy = ("torch", "vllm", "prometheus_client", "aiohttp", "numpy")
    code = f"import sys, afd.metrics.role; print([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == "[]", done.stderr


def dashboard_queries() -> list[tuple[str, str]]:
    found = []
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        for panel in board["panels"]:
            found += [(panel["title"], target["expr"]) for target in panel.get("targets", [])]
    return found


def test_dashboard_is_well_formed() -> None:
    assert DASHBOARDS
    for path in DASHBOARDS:
        board = json.loads(path.read_text())
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
        boxes = [panel["gridPos"] for panel in board["panels"]]
        cells = [
            (x, y)
            for box in boxes
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        ]
        assert len(set(cells)) == len(cells), "panels overlap"
        assert max(x for x, _ in cells) < 24
    assert len(dashboard_queries()) > 10


@pytest.mark.parametrize(("title", "query"), dashboard_queries())
def test_each_query_names_an_exported_metric(title: str, query: str) -> None:
    named = re.findall(r"(?<![\w:])(?:vllm:|afd_|afd:)[\w:]+", query)
    assert named, title
    vllm = {name + suffix for name in VLLM_METRICS for suffix in SUFFIXES}
    assert set(named) <= exported_names() | vllm | set(RECORDED)
    assert query.count("(") == query.count(")") and query.count("{") == query.count("}")


def test_labels_in_queries_exist() -> None:
    known = {"le", "instance", "stage", "side", "direction", "role", "depth", "kind", "code",
             "path_template", "method", "model_name", "reason", "layer", "expert", "peer", "path",
             "thread", "host", "port", "event", "when"}  # fmt: skip
    for title, query in dashboard_queries():
        for group in re.findall(r"\bby\s*\(([^)]*)\)", query):
            assert {label.strip() for label in group.split(",")} <= known, title
        for selector in re.findall(r"\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) <= known, title


def test_the_files_are_what_the_table_says() -> None:
    """`python -m afd_bench.operate.files` writes dashboards and alerts, and the chart's copies."""
    pytest.importorskip("grafana_foundation_sdk")
    assert {path.name for path, text in texts().items() if path.read_text() != text} == set()


def test_docs_name_every_alert() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert {alert.name for alert in ALERTS} <= set(re.findall(r"`(Afd\w+)`", text))


def test_vllm_still_has_the_metrics_we_rely_on() -> None:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vllm is not installed")
    folder = Path(next(iter(spec.submodule_search_locations))) / "v1" / "metrics"
    source = "".join(path.read_text() for path in folder.glob("*.py"))
    missing = {name for name in VLLM_METRICS if f'name="{name}"' not in source}
    assert not missing


def test_docs_name_every_metric() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"`((?:vllm:|afd_)\w+)[`{]", text))
    roles = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in exported_names()
    }
    assert roles <= documented
    stripped = {name.removesuffix("_total") for name in documented}
    assert {name.removesuffix("_total") for name in roles} | VLLM_METRICS >= stripped
