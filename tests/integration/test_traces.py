"""A client's W3C trace context reaches vLLM through the gateway: one trace has the request."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from deployments import BLOCK, SETTINGS, Models
from helpers import environment, openai_client, tokens_of, wait_until

from afd_bench.servers import disaggregated

pytestmark = [pytest.mark.serve, pytest.mark.long]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP/HTTP collector. Yields its URL and the spans that it has received."""
    trace_service = pytest.importorskip(
        "opentelemetry.proto.collector.trace.v1.trace_service_pb2",
        reason="vLLM's extra otel is not installed",
    )
    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = trace_service.ExportTraceServiceRequest.FromString(body)
            spans.extend(s for r in request.resource_spans for o in r.scope_spans for s in o.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        server.shutdown()


def test_a_request_is_one_span_of_the_clients_trace(tiny_models: Models) -> None:
    with collector() as (url, spans):
        config: dict[str, object] = {
            "model": str(tiny_models("qwen3_moe")),
            "attention": {**SETTINGS, "vllm_args": [BLOCK, f"--otlp-traces-endpoint={url}"]},
        }
        protocol = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
        with environment(**protocol), disaggregated(config) as server:
            openai_client(server.url).completions.create(
                model="model",
                prompt=list(tokens_of("traced", 12)),
                max_tokens=5,
                extra_headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"},
            )

            def found() -> list[Any]:
                return [s for s in spans if s.trace_id.hex() == TRACE and s.name == "llm_request"]

            wait_until(found, 30, "the request's span has been exported")
            time.sleep(0.5)
            (span,) = found()
        values = {a.key: a.value for a in span.attributes}
        assert values["gen_ai.usage.completion_tokens"].int_value == 5
        assert values["gen_ai.usage.prompt_tokens"].int_value == 12
        assert span.parent_span_id.hex() == "00f067aa0ba902b7"
