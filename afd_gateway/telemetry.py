"""The gateway's own metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from afd_gateway.attempt import Cause
from afd_gateway.upstreams import View

GATEWAY_METRICS = (
    "afd_gateway_requests_total",
    "afd_gateway_retries_total",
    "afd_gateway_replays_total",
    "afd_gateway_refused_total",
    "afd_gateway_prefills_total",
    "afd_gateway_inflight_requests",
    "afd_gateway_waiting_requests",
    "afd_gateway_upstream_up",
    "afd_peer_up",
)

_METHODS = frozenset({"GET", "POST", "HEAD", "PUT", "PATCH", "DELETE", "OPTIONS"})
_PATHS = frozenset(
    {
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/models",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/detokenize",
        "/health",
        "/metrics",
        "/openapi.json",
        "/ping",
        "/tokenize",
        "/version",
    }
)
# connections: too many are open. descriptors: an accept failed. malformed: not valid HTTP.
# body_timeout: a body came too slowly. bodies: all bodies together are too large. unauthorized: no
# valid API key. key_limit: the API key runs as many requests as it may. queue_full, queue_time: too
# many requests wait, or one waited too long. queue_share: the queue is full, and the key has its
# share of it. slow_client: a client did not read.
REFUSALS = (
    "connections", "descriptors", "malformed", "body_timeout", "bodies",
    "unauthorized", "key_limit", "queue_full", "queue_time", "queue_share", "slow_client",
)  # fmt: skip
# moved: a prefill instance computed the prompt. failed: one failed to. local: the attention
# instance computes it, because no prefill instance could.
Prefilled = Literal["moved", "failed", "local"]
_PREFIXES = {"/v1/models/": "/v1/models/{model}", "/v1/responses/": "/v1/responses/{id}"}


def path_template(path: str) -> str:
    """Returns a label of bounded cardinality: a known path, one of two templates, or "other"."""
    if path in _PATHS:
        return path
    return next((t for prefix, t in _PREFIXES.items() if path.startswith(prefix)), "other")


class Telemetry:
    """Keeps the counters; gauges are read from the pool's views when the page is built.

    The label ``instance`` is the gateway for request counts, and the member for other metrics;
    ``gateway`` is the process that tells of it.
    """

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "afd_gateway_requests",
            "Requests answered, by HTTP status (499: the client went away first).",
            ["instance", "method", "path_template", "code"],
            registry=self._registry,
        )
        self._retries = Counter(
            "afd_gateway_retries",
            "Requests sent again after an attention instance failed them.",
            ["instance", "cause"],
            registry=self._registry,
        )
        self._replays = Counter(
            "afd_gateway_replays",
            "Begun answers that went on after an attention instance failed them.",
            ["instance", "cause"],
            registry=self._registry,
        )
        self._refused = Counter(
            "afd_gateway_refused",
            "Connections and requests that the gateway refused to protect itself.",
            ["instance", "reason"],
            registry=self._registry,
        )
        self._prefills = Counter(
            "afd_gateway_prefills",
            "Prompts for prefill instances, by result.",
            ["instance", "result"],
            registry=self._registry,
        )
        for result in get_args(Prefilled):
            self._prefills.labels(instance, result)
        for reason in REFUSALS:
            self._refused.labels(instance, reason)
        for cause in get_args(Cause):  # shows 0 before the first retry
            self._retries.labels(instance, cause)
            self._replays.labels(instance, cause)

    def request(self, method: str, path: str, code: int) -> None:
        known = method if method in _METHODS else "other"
        self._requests.labels(self._instance, known, path_template(path), str(code)).inc()

    def retry(self, cause: Cause, *, begun: bool) -> None:
        """cause: of the failed attempt. begun: the client has the beginning of the answer."""
        (self._replays if begun else self._retries).labels(self._instance, cause).inc()

    def refused(self, reason: str) -> None:
        """reason: one of REFUSALS."""
        self._refused.labels(self._instance, reason).inc()

    def prefill(self, result: Prefilled) -> None:
        self._prefills.labels(self._instance, result).inc()

    def text(self, views: Iterable[View], peer_up: dict[str, bool], waiting: int = 0) -> str:
        """Returns Prometheus text.

        Args:
            peer_up: member id -> whether all its pages were scraped.
            waiting: requests that wait for an attention instance or for their turn.
        """
        registry = CollectorRegistry()
        registry.register(_Gauges(self._instance, tuple(views), peer_up, waiting))
        return (generate_latest(self._registry) + generate_latest(registry)).decode()


class _Gauges:
    def __init__(
        self, instance: str, views: tuple[View, ...], peer_up: dict[str, bool], waiting: int
    ) -> None:
        self._instance = instance
        self._waiting = waiting
        self._views = [view for view in views if view.upstream.is_server]
        self._peer_up = peer_up

    def collect(self) -> list[Metric]:
        inflight = GaugeMetricFamily(
            "afd_gateway_inflight_requests",
            "Requests forwarded to an attention or prefill instance and not yet finished.",
            labels=["instance", "gateway"],
        )
        up = GaugeMetricFamily(
            "afd_gateway_upstream_up",
            "1 if the gateway sends requests to this attention instance.",
            labels=["instance", "gateway"],
        )
        for view in self._views:
            labels = [view.upstream.id, self._instance]
            inflight.add_metric(labels, view.outstanding)
            if view.upstream.task == "generate":
                up.add_metric(labels, float(view.eligible))
        peers = GaugeMetricFamily(
            "afd_peer_up", "1 if the metrics of this member could be scraped.", labels=["instance"]
        )
        for member_id, is_up in self._peer_up.items():
            peers.add_metric([member_id], float(is_up))
        waiting = GaugeMetricFamily(
            "afd_gateway_waiting_requests",
            "Requests that wait for their turn, or for an attention instance to come back.",
            labels=["instance"],
        )
        waiting.add_metric([self._instance], self._waiting)
        return [inflight, up, peers, waiting]
