"""Every alert fires once its fault has lasted, and not before: `promtool test rules`."""

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from afd.errors import ConfigError
from afd.host.package_data import data_folder
from afd_bench.operate.alerts import ALERTS
from afd_bench.operate.prometheus import CACHE, find_programs

RULES = data_folder("afd_launch") / "dashboards" / "prometheus" / "alerts.yaml"
HEALTHY, LENGTH = 40, 120  # samples, one every 15 s: 10 minutes healthy, then 20 with the fault


@dataclass(frozen=True)
class Fault:
    """Series in promtool's notation, healthy and faulty. labels: of the alert."""

    alert: str
    series: dict[str, tuple[str, str]]
    labels: dict[str, str] = field(default_factory=dict)


V1 = 'path_template="/v1/completions"'
PORT = 'host="h",port="mlx5_0:1",event="out_of_sequence"'
A0, F0 = {"instance": "attention-0"}, {"instance": "ffn-0"}
TIME = "afd_stage_seconds_sum"
CALLS = "afd_stage_seconds_count"
FAULTS = (
    Fault("AfdGatewayDown", {'up{job="afd"}': ("1", "0"), 'afd_peer_up{instance="a"}': ("1", "1")},
          {"job": "afd"}),
    Fault("AfdNoInstanceTakesRequests", {'afd_gateway_upstream_up{instance="a"}': ("1", "0")}),
    Fault("AfdMemberDown", {'afd_peer_up{instance="ffn-0"}': ("1", "0")}, F0),
    Fault("AfdFfnLost", {'afd_ffn_retries_total{instance="attention-0"}': ("+0", "+1")}),
    Fault(
        "AfdServerErrors",
        {
            f'afd_gateway_requests_total{{code="200",{V1}}}': ("+99", "+90"),
            f'afd_gateway_requests_total{{code="503",{V1}}}': ("+0", "+9"),
        },
    ),
    Fault("AfdGatewayRefuses", {'afd_gateway_refused_total{reason="bodies"}': ("+0", "+1")},
          {"reason": "bodies"}),
    Fault("AfdQueueGrows", {'vllm:num_requests_waiting{instance="attention-0"}': ("0", "7")}, A0),
    Fault("AfdKvCacheFull",
          {'vllm:kv_cache_usage_perc{instance="attention-0"}': ("0.9", "0.99")}, A0),
    Fault(
        "AfdTpotOverTarget",
        {
            'afd_tpot_target_seconds{instance="attention-0"}': ("0.05", "0.05"),
            'afd_decode_steps_total{instance="attention-0",rows="8"}': ("+100", "+100"),
            'afd_decode_step_seconds_total{instance="attention-0",rows="8"}': ("+4", "+6"),
        },
        A0,
    ),
    Fault(
        "AfdStraggler",
        {
            **{
                f'{TIME}{{instance="ffn-{j}",stage="ffn"}}': ("+1", "+1") for j in (1, 2)
            },
            f'{TIME}{{instance="ffn-0",stage="ffn"}}': ("+1", "+2"),
            **{
                f'{CALLS}{{instance="ffn-{j}",stage="ffn"}}': ("+10", "+10") for j in (0, 1, 2)
            },
        },
        {**F0, "stage": "ffn"},
    ),
    Fault("AfdLatePeers", {'afd_late_peers_total{instance="ffn-0"}': ("+0", "+2")}, F0),
    Fault("AfdGraphCaptures",
          {'afd_ffn_graph_captures_total{instance="ffn-0",when="after"}': ("+0", "+1")},
          {**F0, "when": "after"}),
    Fault(
        "AfdRdmaTrouble",
        {f"afd_rdma_port_events_total{{{PORT}}}": ("+1", "+999")},
        {"host": "h", "port": "mlx5_0:1", "event": "out_of_sequence"},
    ),
)  # fmt: skip


def values(healthy: str, faulty: str) -> str:
    """promtool's notation for HEALTHY samples of one kind and then of the other."""
    if not healthy.startswith("+"):
        return f"{healthy}x{HEALTHY} {faulty}x{LENGTH - HEALTHY}"
    reached = float(healthy) * HEALTHY
    return f"0{healthy}x{HEALTHY} {reached:g}{faulty}x{LENGTH - HEALTHY}"


def minutes(text: str) -> float:
    number, unit = re.fullmatch(r"(\d+)([sm])", text).groups()  # type: ignore[union-attr]
    return int(number) / (60 if unit == "s" else 1)


def case(fault: Fault) -> dict[str, Any]:
    (alert,) = [one for one in ALERTS if one.name == fault.alert]
    summary = re.sub(r"\{\{ \$labels\.(\w+) \}\}", lambda m: fault.labels[m[1]], alert.summary)
    fires = {
        "exp_labels": {"severity": alert.severity, **fault.labels},
        "exp_annotations": {"summary": summary, "description": alert.remedy},
    }
    began = HEALTHY // 4  # minutes
    quiet, told = (f"{began * 60 - 15}s", f"{(began + minutes(alert.lasts) + 6) * 60:g}s")
    return {
        "interval": "15s",
        "input_series": [
            {"series": name, "values": values(*both)} for name, both in fault.series.items()
        ],
        "alert_rule_test": [
            {"eval_time": quiet, "alertname": alert.name, "exp_alerts": []},
            {"eval_time": told, "alertname": alert.name, "exp_alerts": [fires]},
        ],
    }


@pytest.fixture(scope="module")
def promtool() -> Path:
    try:
        return find_programs(CACHE)[1]
    except ConfigError as reason:
        pytest.skip(str(reason))


def test_every_alert_has_a_fault() -> None:
    assert {fault.alert for fault in FAULTS} == {alert.name for alert in ALERTS}


def test_alerts_fire_for_their_fault_and_not_before(promtool: Path, tmp_path: Path) -> None:
    tests = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "15s",
        "tests": [case(fault) for fault in FAULTS],
    }
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [str(promtool), "test", "rules", str(tmp_path / "tests.yaml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
