"""Recording rules and alerts, as plain data of a Prometheus rule file.

Thresholds are ratios or shares, so that they fit any model and any hardware. Each alert names the
remedy in its description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_STAGE_MEAN = (
    "sum by (instance, stage) (rate(afd_stage_seconds_sum[1m]))"
    " / (sum by (instance, stage) (rate(afd_stage_seconds_count[1m])) > 0)"
)

RECORDED: dict[str, str] = {
    "afd:stage_seconds:mean1m": _STAGE_MEAN,
    # Only where two members have the stage: one alone is always like the median.
    "afd:stage_straggler:ratio": (
        "afd:stage_seconds:mean1m / on (stage) group_left () "
        "quantile by (stage) (0.5, afd:stage_seconds:mean1m)"
    ),
}


@dataclass(frozen=True)
class Alert:
    """One alert. lasts: how long the expression must hold, such as 30s."""

    name: str
    expr: str
    lasts: str
    severity: str
    summary: str
    remedy: str


ALERTS: tuple[Alert, ...] = (
    Alert(
        "AfdGatewayDown",
        'absent(afd_peer_up) or up{job=~".*afd.*"} == 0',
        "30s",
        "critical",
        "The gateway's metrics cannot be scraped",
        "Clients reach nothing. See the gateway's log.",
    ),
    Alert(
        "AfdNoInstanceTakesRequests",
        "sum(afd_gateway_upstream_up) == 0",
        "30s",
        "critical",
        "No attention instance takes requests",
        "/health of the gateway names the members that are missing.",
    ),
    Alert(
        "AfdMemberDown",
        "afd_peer_up == 0",
        "1m",
        "warning",
        "{{ $labels.instance }} has been away for a minute",
        "See its log. An FFN instance that is away stops all decoding.",
    ),
    Alert(
        "AfdFfnLost",
        "sum(increase(afd_ffn_retries_total[2m])) > 0",
        "0s",
        "warning",
        "An FFN instance was lost, and its rows were sent again",
        "No request is lost if it is back within deadlines.ffn_s. See its log for the cause.",
    ),
    Alert(
        "AfdServerErrors",
        'sum(rate(afd_gateway_requests_total{code=~"5..",path_template=~"/v1/.*"}[1m]))'
        ' / sum(rate(afd_gateway_requests_total{path_template=~"/v1/.*"}[1m])) > 0.01',
        "1m",
        "critical",
        "More than one percent of the requests fail",
        "The gateway logs each 502 and 503 with the reason.",
    ),
    Alert(
        "AfdGatewayRefuses",
        'sum by (reason) (rate(afd_gateway_refused_total{reason=~"connections|descriptors|bodies"}'
        "[1m])) > 0",
        "1m",
        "warning",
        "The gateway refuses clients ({{ $labels.reason }})",
        "Raise the limit of open files, or put several gateways behind a load balancer.",
    ),
    Alert(
        "AfdQueueGrows",
        "min_over_time(vllm:num_requests_waiting[2m]) > 0"
        " and delta(vllm:num_requests_waiting[2m]) >= 0",
        "1m",
        "warning",
        "Requests have waited in {{ $labels.instance }} for minutes, and the queue does not shrink",
        "Add attention instances, or raise attention.kv_cache_gib or max_num_seqs.",
    ),
    Alert(
        "AfdKvCacheFull",
        "min_over_time(vllm:kv_cache_usage_perc[1m]) > 0.95",
        "1m",
        "warning",
        "The KV cache of {{ $labels.instance }} is full",
        "Requests wait or are preempted. Add attention instances or raise attention.kv_cache_gib.",
    ),
    Alert(
        "AfdTpotOverTarget",
        "sum by (instance) (rate(afd_decode_step_seconds_total[1m]))"
        " / sum by (instance) (rate(afd_decode_steps_total[1m]))"
        " > on (instance) afd_tpot_target_seconds",
        "2m",
        "warning",
        "Decode steps of {{ $labels.instance }} miss pipeline.tpot_ms",
        "The panel Headroom shows which stage is too slow; `afd ctl why-slow` says why.",
    ),
    Alert(
        "AfdStraggler",
        "afd:stage_straggler:ratio > 1.5"
        " and on (stage) count by (stage) (afd:stage_seconds:mean1m) > 2",
        "1m",
        "warning",
        "{{ $labels.instance }} is slower than its peers in stage {{ $labels.stage }}",
        "Run `afd ctl why-slow`. It tells processor, accelerator, wire and imbalance apart.",
    ),
    Alert(
        "AfdLatePeers",
        "sum by (instance) (increase(afd_late_peers_total[2m])) > 3",
        "0s",
        "warning",
        "Steps on {{ $labels.instance }} go on without late attention instances",
        "Look for an attention instance that stalls: its host's load, or its network.",
    ),
    Alert(
        "AfdGraphCaptures",
        'increase(afd_ffn_graph_captures_total{when="after"}[5m]) > 0',
        "0s",
        "warning",
        "{{ $labels.instance }} captured a graph while it served",
        "Each capture delays requests. Captures belong to the start; report it.",
    ),
    Alert(
        "AfdRdmaTrouble",
        "sum by (host, port, event) (rate(afd_rdma_port_events_total[1m])) > 10",
        "1m",
        "warning",
        "RDMA port {{ $labels.port }} of {{ $labels.host }} counts {{ $labels.event }}",
        "Check cable, PFC and ECN of this port; docs/rdma.md has the order.",
    ),
)


def rule_groups() -> dict[str, Any]:
    """Returns the content of a Prometheus rule file, which is also a PrometheusRule's spec."""
    recorded = [{"record": name, "expr": expr} for name, expr in RECORDED.items()]
    alerts = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.remedy},
        }
        for alert in ALERTS
    ]
    groups = (("afd-recorded", recorded), ("afd-alerts", alerts))
    return {"groups": [{"name": n, "interval": "15s", "rules": r} for n, r in groups]}
