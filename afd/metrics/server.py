"""A role's HTTP pages: /metrics for Prometheus, /trace for `afd trace`, /steps, and probes.

/ready answers 200 once the role has told the control plane that it is ready, before that 503. /live
answers 200: the process runs. A hung expert call ends the process by itself.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from afd.errors import ConfigError
from afd.metrics.role import RoleCollector, RoleMetrics
from afd.metrics.trace import events_of

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


@dataclass(frozen=True)
class MetricsServer:
    """A running scrape endpoint. ``url`` ends in /metrics and names the bound port."""

    url: str
    _server: WSGIServer
    _thread: threading.Thread

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5.0)


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    daemon_threads = True  # an endless reader must not keep the role alive


class _Silent(WSGIRequestHandler):
    timeout = 10.0  # seconds without a byte; an idle connection would keep its thread

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Scrapes are not logged."""


def serve_metrics(
    metrics: RoleMetrics, host: str = "127.0.0.1", port: int = 0, *, advertise: str | None = None
) -> MetricsServer:
    """Serve the metrics over HTTP from a daemon thread.

    Args:
        host: address to listen on.
        port: 0: any free port.
        advertise: host for the URL; needed if ``host`` is a wildcard such as 0.0.0.0.

    Raises:
        ConfigError: the port is taken.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app

    # Not the default registry: vLLM's engine process may fill it with other metrics, or run
    # prometheus_client in multi-process mode, which ignores custom collectors.
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RoleCollector(metrics))
    page = make_wsgi_app(registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        answer: object
        status = "200 OK"
        if environ["PATH_INFO"] in ("/ready", "/live"):
            answer = {"ready": metrics.ready}
            if environ["PATH_INFO"] == "/ready" and not metrics.ready:
                status = "503 Service Unavailable"
        elif environ["PATH_INFO"] == "/trace":
            answer = events_of(dict(metrics.wire_traces))
        elif environ["PATH_INFO"] == "/steps":
            answer = [step.plain() for step in metrics.step_traces.all()]
        else:
            body: Iterable[bytes] = page(environ, start_response)
            return body
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps(answer).encode()]

    class Server(_ThreadingServer):
        address_family = _family(host)

    try:
        server = make_server(host, port, app, Server, handler_class=_Silent)
    except OSError as error:
        raise ConfigError(
            f"metrics: cannot listen on port {port} of {host} ({error.strerror or error});"
            " use port 0 for any free port"
        ) from None
    thread = threading.Thread(target=server.serve_forever, name="afd-metrics", daemon=True)
    thread.start()
    shown = advertise or host
    shown = f"[{shown}]" if ":" in shown else shown
    return MetricsServer(f"http://{shown}:{server.server_port}/metrics", server, thread)


def _family(host: str) -> int:
    import socket

    return socket.AF_INET6 if ":" in host else socket.AF_INET
