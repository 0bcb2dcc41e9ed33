"""An OTLP/HTTP collector in this process. Keeps the spans that it gets."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Seen:
    """One span. Ids in hexadecimal digits; parent "": it has none. Times in ns since the epoch."""

    service: str
    name: str
    trace: str
    id: str
    parent: str
    facts: dict[str, object]
    failed: bool
    links: tuple[str, ...]
    began_ns: int
    ended_ns: int


@dataclass
class Collector:
    url: str = ""
    spans: list[Seen] = field(default_factory=list)

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _facts(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                self.spans += [
                    Seen(
                        str(service),
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        _facts(span.attributes),
                        span.status.code == 2,
                        tuple(link.span_id.hex() for link in span.links),
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                    )
                    for span in scope.spans
                ]

    def wait(self, count: int, deadline_s: float = 5.0) -> list[Seen]:
        """Returns the spans, once there are ``count`` of them."""
        end = time.monotonic() + deadline_s
        while len(self.spans) < count and time.monotonic() < end:
            time.sleep(0.02)
        return list(self.spans)

    def named(self, name: str) -> list[Seen]:
        return [span for span in self.spans if span.name == name]


def _facts(attributes: object) -> dict[str, object]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in attributes}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    made = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            import gzip

            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            made.take(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
