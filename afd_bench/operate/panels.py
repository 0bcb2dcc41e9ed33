"""What the dashboards show. Pure data; docs/metrics.md explains the metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Needs = Literal["", "graphs", "rdma", "target"]
"""What a deployment must have for a panel to show data: graphs on GPUs, backend verbs, or
``pipeline.tpot_ms``."""

MEMBER = 'instance=~"$instance"'
RATE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    """One PromQL expression. legend: with {{label}} placeholders."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel. unit: a unit id of Grafana. stat: the last value as a number; else a time series.

    width, height: in cells of Grafana's grid, which is 24 wide.
    """

    title: str
    text: str
    unit: str
    queries: tuple[Query, ...]
    stat: bool = False
    needs: Needs = ""
    width: int = 8
    height: int = 8


@dataclass(frozen=True)
class Row:
    title: str
    panels: tuple[Panel, ...] = field(default=())


def _rate(metric: str, by: str, match: str = MEMBER) -> str:
    return f"sum by ({by}) (rate({metric}{{{match}}}[{RATE}]))"


def _mean(histogram: str, by: str, match: str = MEMBER) -> str:
    return f"{_rate(histogram + '_sum', by, match)} / {_rate(histogram + '_count', by, match)}"


def _quantiles(histogram: str) -> tuple[Query, ...]:
    buckets = f"sum by (le) (rate({histogram}_bucket{{{MEMBER}}}[{RATE}]))"
    return tuple(
        Query(f"histogram_quantile({q:.2f}, {buckets})", f"p{q * 100:.0f}")
        for q in (0.5, 0.95, 0.99)
    )


def _share(side: str) -> Query:
    """The bubble of one side over its bubble plus its own stage."""
    bubble = _rate("afd_bubble_seconds_total", "instance", f'side="{side}", {MEMBER}')
    work = _rate("afd_stage_seconds_sum", "instance", f'stage="{side}", {MEMBER}')
    return Query(f"{bubble} / ({bubble} + {work})", "{{instance}}")


def _stat(title: str, text: str, *queries: Query) -> Panel:
    return Panel(title, text, "short", queries, stat=True, width=6, height=4)


SERVICE = Row(
    "Service",
    (
        _stat(
            "Members reachable",
            "Members whose metrics the gateway can scrape, out of all it expects.",
            Query("sum(afd_peer_up)", "up"),
            Query("count(afd_peer_up)", "expected"),
        ),
        _stat(
            "Instances taking requests",
            "Attention instances to which the gateway sends requests.",
            Query("sum(max by (instance) (afd_gateway_upstream_up))", "up"),
        ),
        _stat(
            "Running",
            "Requests in vLLM's running batches.",
            Query(f"sum(vllm:num_requests_running{{{MEMBER}}})", "running"),
        ),
        _stat(
            "Waiting",
            "Requests in vLLM's queues.",
            Query(f"sum(vllm:num_requests_waiting{{{MEMBER}}})", "waiting"),
        ),
        Panel(
            "Time to first token",
            "From arrival to the first token.",
            "s",
            _quantiles("vllm:time_to_first_token_seconds"),
        ),
        Panel(
            "Time per output token",
            "Mean time per token after the first, per request.",
            "s",
            _quantiles("vllm:request_time_per_output_token_seconds"),
        ),
        Panel(
            "Tokens per second",
            "Generated tokens, and prompt tokens processed.",
            "short",
            (
                Query(f"sum(rate(vllm:generation_tokens_total{{{MEMBER}}}[{RATE}]))", "generated"),
                Query(f"sum(rate(vllm:prompt_tokens_total{{{MEMBER}}}[{RATE}]))", "prompt"),
            ),
        ),
        Panel(
            "Requests per second",
            "Requests answered, by HTTP status; 499: the client went away first.",
            "reqps",
            (
                Query(
                    _rate("afd_gateway_requests_total", "code", 'path_template=~"/v1/.*"'),
                    "{{code}}",
                ),
            ),
        ),
        Panel(
            "Refused",
            "Connections and requests that the gateway refused to protect itself.",
            "short",
            (Query(_rate("afd_gateway_refused_total", "reason", ""), "{{reason}}"),),
        ),
    ),
)

INSTANCES = Row(
    "Attention instances",
    (
        Panel(
            "Requests in flight",
            "Requests that the gateway has forwarded to each instance.",
            "short",
            (
                Query(
                    f"sum by (instance) (afd_gateway_inflight_requests{{{MEMBER}}})", "{{instance}}"
                ),
            ),
        ),
        Panel(
            "Queue",
            "Requests waiting in each instance, which lacks KV cache or has max_num_seqs, and in"
            " the gateway.",
            "short",
            (
                Query(f"vllm:num_requests_waiting{{{MEMBER}}}", "{{instance}}"),
                Query("sum by (instance) (afd_gateway_waiting_requests)", "{{instance}}"),
            ),
        ),
        Panel(
            "KV cache in use",
            "Share of each instance's KV cache. Near 1, requests wait or are preempted.",
            "percentunit",
            (Query(f"vllm:kv_cache_usage_perc{{{MEMBER}}}", "{{instance}}"),),
        ),
        Panel(
            "Preemptions",
            "Requests per second that lost their KV cache and are computed again.",
            "short",
            (Query(_rate("vllm:num_preemptions_total", "instance"), "{{instance}}"),),
        ),
        Panel(
            "Decode step",
            "Mean time from one decode step to the next: the time per output token.",
            "s",
            (
                Query(
                    f"{_rate('afd_decode_step_seconds_total', 'instance')} / "
                    f"{_rate('afd_decode_steps_total', 'instance')}",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Steps per second by depth",
            "Steps of both sides, by their number of micro-batches.",
            "short",
            (Query(_rate("afd_steps_total", "depth"), "depth {{depth}}"),),
        ),
    ),
)

_BUDGET = f"max by (stage) (afd_stage_budget_seconds{{{MEMBER}}})"

PIPELINE = Row(
    "Pipeline",
    (
        Panel(
            "Stage time, mean",
            "Time of one micro-batch in one layer. The slowest stage bounds the throughput.",
            "s",
            (Query(_mean("afd_stage_seconds", "stage"), "{{stage}}"),),
        ),
        Panel(
            "Stage time, p99",
            "The slowest hundredth of all micro-batches.",
            "s",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le, stage) "
                    f"(rate(afd_stage_seconds_bucket{{{MEMBER}}}[{RATE}])))",
                    "{{stage}}",
                ),
            ),
        ),
        Panel(
            "Headroom",
            "Share of the stage's time budget that is left; below 0, the stage alone misses the"
            " target pipeline.tpot_ms.",
            "percentunit",
            (
                Query(
                    f"1 - ({_mean('afd_stage_seconds', 'stage')}) / on (stage) {_BUDGET}",
                    "{{stage}}",
                ),
            ),
            needs="target",
        ),
        Panel(
            "Bubble share",
            "Share of a step in which a member waited for its peers.",
            "percentunit",
            (_share("attention"), _share("ffn")),
        ),
        Panel(
            "Straggler score",
            "Mean stage time of a member over the median of all members in that stage. 1: like the"
            " others. `afd ctl why-slow` names the cause.",
            "short",
            (Query(f"afd:stage_straggler:ratio{{{MEMBER}}}", "{{instance}} {{stage}}"),),
        ),
        Panel(
            "Rows per FFN call",
            "Rows of all attention instances in one call of the experts.",
            "short",
            (
                Query(
                    "histogram_quantile(0.50, sum by (le) "
                    f"(rate(afd_rows_per_ffn_call_bucket{{{MEMBER}}}[{RATE}])))",
                    "p50",
                ),
                Query(
                    f"sum(rate(afd_rows_per_ffn_call_sum{{{MEMBER}}}[{RATE}])) / "
                    f"sum(rate(afd_rows_per_ffn_call_count{{{MEMBER}}}[{RATE}]))",
                    "mean",
                ),
            ),
        ),
        Panel(
            "Expert load",
            "Rows of the busiest expert over the mean of all experts, per layer.",
            "short",
            (
                Query(
                    f"max by (layer) ({_rate('afd_expert_rows_total', 'layer, expert')}) / "
                    f"avg by (layer) ({_rate('afd_expert_rows_total', 'layer, expert')})",
                    "layer {{layer}}",
                ),
            ),
        ),
        Panel(
            "Slots in flight",
            "Share of a member's slots that are posted and not yet answered.",
            "percentunit",
            (Query(f"afd_slots_in_flight{{{MEMBER}}} / afd_slots{{{MEMBER}}}", "{{instance}}"),),
        ),
        Panel(
            "Peers up",
            "Members of the other role that a member is connected to.",
            "short",
            (Query(f"afd_peers_up{{{MEMBER}}}", "{{instance}} to {{role}}"),),
        ),
    ),
)

WIRE = Row(
    "Wire",
    (
        Panel(
            "Bytes per second",
            "Bytes written into peers' slots, by direction.",
            "Bps",
            (Query(_rate("afd_wire_bytes_total", "direction"), "{{direction}}"),),
        ),
        Panel(
            "Message time, mean",
            "Time of one message from one member to another.",
            "s",
            (
                Query(
                    _mean("afd_wire_seconds", "instance, peer", f'path="inbound", {MEMBER}'),
                    "{{peer}} to {{instance}}",
                ),
            ),
        ),
        Panel(
            "Transport threads",
            "Share of a core that the transport's threads of a member use.",
            "percentunit",
            (
                Query(
                    _rate("afd_transport_thread_cpu_seconds_total", "instance, thread"),
                    "{{instance}} {{thread}}",
                ),
            ),
        ),
        Panel(
            "RDMA bytes per second",
            "Bytes of each RDMA port, from the port's own counters.",
            "Bps",
            (
                Query(
                    _rate("afd_rdma_port_bytes_total", "host, port, direction"),
                    "{{host}} {{port}} {{direction}}",
                ),
            ),
            needs="rdma",
        ),
        Panel(
            "RDMA trouble",
            "Events per second that the port counts: lost, repeated and late packets.",
            "short",
            (
                Query(
                    _rate("afd_rdma_port_events_total", "host, port, event"),
                    "{{host}} {{port}} {{event}}",
                ),
            ),
            needs="rdma",
        ),
    ),
)

FAULTS = Row(
    "Faults and graphs",
    (
        Panel(
            "Retries",
            "Rows sent again after an FFN instance was lost, and requests sent again by the"
            " gateway.",
            "short",
            (
                Query(
                    f"sum by (instance) (increase(afd_ffn_retries_total{{{MEMBER}}}[{RATE}]))",
                    "{{instance}}: FFN lost",
                ),
                Query(
                    f"sum by (instance) (increase(afd_gateway_retries_total[{RATE}]))",
                    "{{instance}}: before the first byte",
                ),
                Query(
                    f"sum by (instance) (increase(afd_gateway_replays_total[{RATE}]))",
                    "{{instance}}: answer went on elsewhere",
                ),
            ),
        ),
        Panel(
            "Late peers",
            "Times that a step went on without a late attention instance.",
            "short",
            (
                Query(
                    f"sum by (instance) (increase(afd_late_peers_total{{{MEMBER}}}[{RATE}]))",
                    "{{instance}}",
                ),
            ),
        ),
        Panel(
            "Steps that no graph ran",
            "Steps per second that the host ran although graphs are on, by reason.",
            "short",
            (Query(_rate("afd_eager_steps_total", "instance, reason"), "{{instance}} {{reason}}"),),
            needs="graphs",
        ),
        Panel(
            "Replayed steps",
            "Steps per second that a GPU replayed as a graph.",
            "short",
            (Query(_rate("afd_graph_steps_total", "instance, depth"), "{{instance}} {{depth}}"),),
            needs="graphs",
        ),
        Panel(
            "Graph captures after start",
            "Graphs that an FFN rank captured while it served; each delays requests.",
            "short",
            (Query(f'afd_ffn_graph_captures_total{{when="after", {MEMBER}}}', "{{instance}}"),),
            needs="graphs",
        ),
        Panel(
            "Weights held",
            "Bytes of weights in memory.",
            "bytes",
            (Query(f"afd_weights_held_bytes{{{MEMBER}}}", "{{instance}} {{kind}}"),),
        ),
        Panel(
            "Weights read",
            "Bytes read from the checkpoint since start: progress of loading.",
            "bytes",
            (Query(f"afd_weights_read_bytes{{{MEMBER}}}", "{{instance}} {{kind}}"),),
        ),
    ),
)

ROWS: tuple[Row, ...] = (SERVICE, INSTANCES, PIPELINE, WIRE, FAULTS)


def panels() -> tuple[Panel, ...]:
    return tuple(panel for row in ROWS for panel in row.panels)


def expanded(expr: str, rate_s: int) -> str:
    """Returns the expression with Grafana's variables replaced: all members, a rate over
    ``rate_s`` seconds."""
    return expr.replace("$__rate_interval", f"{rate_s}s").replace("$instance", ".*")
