"""Settings of the gateway."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from afd.topology import member_id


@dataclass(frozen=True)
class GatewaySettings:
    """Durations are in seconds, sizes in bytes.

    attention_instances / ffn_instances / ffn_tp: sizes of the complete deployment.
    wanted: ids of the instances that operators want now; () before it is known.
    max_body_bytes: largest request body; it stays in memory until the response begins, for retries.
    max_total_body_bytes: bodies of all running requests together.
    body_timeout_s: longest silence inside a body; also allowed on top of the time that
        min_body_bytes_per_s gives the bytes that have arrived.
    idle_timeout_s: from the opening of a connection, or the end of its last response, until the
        next request's headers are complete. Longer than a reverse proxy keeps its connections.
    max_connections: open client connections; None: what the limit of open files allows.
    max_json_bytes: larger JSON responses are streamed instead of held until complete.
    probe_timeout_s: for one /health; long, because a busy API server replies late.
    probe_misses: probes without a reply after which an instance gets no more requests; refused
        probes after which the requests of an instance that left the control plane are given up.
    abandon_after_s: requests of an instance without a good /health for this long are given up.
    max_deliveries: instances in a row that may fail with a request, and add no token to its answer,
        before it is given up.
    waiting, waiting_s: requests that may wait for an attention instance to come back or for their
        turn, and how long.
    replay_s: the same time for requests that an attention instance has lost.
    replay_bytes: memory for what unfinished streams have sent (afd_gateway.journal).
    answers: descriptor of the answers that clients may come back for, which the processes of the
        port share (afd_gateway.kept_answers); None: they are not kept. resume_s: how long after
        their end they are.
    pass_credentials: forward the Authorization header (see SECURITY.md).
    api_keys: file of the API keys that clients need (afd_gateway.api_keys); None: none needed.
    tls: for HTTPS; None: plain HTTP.
    routing, max_running: see the section gateway of the deployment file, afd_gateway.routing and
        admission; max_running None: no limit, and no request waits for its turn.
    prefill_urls: of colocated prefill instances. prefill_ids: attention instances that compute
        prompts only.
    slow_client_s: a connection whose client reads nothing for so long while bytes wait is ended.
    kv_interval_s: between two looks at the KV caches, of one gateway process of one.
    otlp, otlp_share: see the section metrics of the deployment file; otlp None: no traces.
    trace_steps: attention instances make spans of steps, so requests name their parent.
    process, processes: number of this process among those of the port.
    own_upstreams: the same user runs the attention instances, on this host: refuse to connect to
        loopback ports at which another user listens.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    attention_instances: int = 1
    ffn_instances: int = 1
    ffn_tp: int = 1
    wanted: Callable[[], tuple[str, ...]] = tuple
    max_body_bytes: int = 64 * 2**20
    max_total_body_bytes: int = 2**30
    body_timeout_s: float = 30.0
    min_body_bytes_per_s: float = 1024.0
    idle_timeout_s: float = 75.0
    max_connections: int | None = None
    max_json_bytes: int = 16 * 2**20
    connect_timeout_s: float = 5.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 5.0
    probe_misses: int = 3
    abandon_after_s: float = 30.0
    scrape_deadline_s: float = 1.0
    drain_s: float = 30.0
    retry_after_s: int = 5
    max_deliveries: int = 2
    waiting: int = 1024
    waiting_s: float = 60.0
    replay_s: float = 120.0
    replay_bytes: int = 256 * 2**20
    answers: int | None = None
    resume_s: float = 60.0
    instance: str = "gateway-0"
    access_log: bool = False
    metrics: bool = True
    pass_credentials: bool = False
    api_keys: Path | None = None
    tls: ssl.SSLContext | None = None
    own_upstreams: bool = False
    routing: Literal["prefix", "fewest"] = "prefix"
    max_running: int | None = None
    prefill_urls: tuple[str, ...] = ()
    prefill_ids: frozenset[str] = frozenset()
    slow_client_s: float = 60.0
    kv_interval_s: float = 2.0
    otlp: str | None = None
    otlp_share: float = 1.0
    trace_steps: bool = False
    process: int = 0
    processes: int = 1

    def expected_ids(self) -> tuple[str, ...]:
        """Returns the member ids of the complete deployment."""
        attention = tuple(member_id("attention", i) for i in range(self.attention_instances))
        ffn = tuple(member_id("ffn", i) for i in range(self.ffn_instances))
        wanted = self.wanted() or (*attention, *ffn)
        # An FFN instance beyond those of the start may not have joined yet.
        ranks = [i for i in range(self.ffn_instances) if ffn[i] in wanted]
        return tuple(i for i in wanted if i.startswith("attention-")) + tuple(
            member_id("ffn", i, rank) for i in ranks for rank in range(self.ffn_tp)
        )
