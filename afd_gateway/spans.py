"""Spans of requests, in OpenTelemetry's form (docs/traces.md); only if ``metrics.otlp`` is set.

A request has one span, and each attempt at an attention instance one below it. vLLM's span is a
child of the attempt, because the attempt's context goes upstream as the W3C headers. No span holds
a prompt, an answer or a credential.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from afd.metrics.otlp import PARENT, make_provider, shutdown
from afd_gateway.admission import takes_a_turn
from afd_gateway.relay import final_status
from afd_gateway.replay import CHAT, MAX_BODY_BYTES, TEXT
from afd_gateway.settings import GatewaySettings
from afd_gateway.trace import TRACE

_OPERATIONS = {CHAT: "chat", TEXT: "text_completion", "/v1/embeddings": "embeddings"}
_W3C = TraceContextTextMapPropagator()


class _Asked(msgspec.Struct):
    """What spans tell of a request's body."""

    model: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    temperature: Any = None
    top_p: Any = None
    stream: Any = None


class SpanOfAttempt:
    """Makes :class:`afd_gateway.trace.Attempt`."""

    def __init__(self, span: Span, *, steps: bool) -> None:
        self.headers: dict[str, str] = {}
        _W3C.inject(self.headers, set_span_in_context(span))
        self._marked = steps and span.is_recording()

    def body(self, body: bytes) -> bytes:
        return with_parent(body, self.headers["traceparent"]) if self._marked else body


class SpanOfRequest:
    """Makes :class:`afd_gateway.trace.Trace`. steps: see GatewaySettings.trace_steps."""

    def __init__(self, tracer: Tracer, request: web.Request, *, steps: bool) -> None:
        self._tracer = tracer
        self._operation = _OPERATIONS.get(request.path, request.path)
        self._steps = steps and request.path in (CHAT, TEXT)
        self._plain = "Content-Encoding" not in request.headers
        self._span = tracer.start_span(
            self._operation,
            _W3C.extract(request.headers),
            SpanKind.SERVER,
            {
                "gen_ai.operation.name": self._operation,
                "gen_ai.provider.name": "afd",
                "http.request.method": request.method,
                "url.path": request.path,
            },
        )

    def describe(self, body: bytes) -> None:
        if not (self._span.is_recording() and self._plain and len(body) <= MAX_BODY_BYTES):
            return
        try:
            asked = msgspec.json.decode(body, type=_Asked)
        except msgspec.DecodeError:
            return
        if isinstance(asked.model, str):
            self._span.set_attribute("gen_ai.request.model", asked.model)
            self._span.update_name(f"{self._operation} {asked.model}")
        if isinstance(asked.stream, bool):
            self._span.set_attribute("gen_ai.request.stream", asked.stream)
        numbers = {
            "max_tokens": asked.max_completion_tokens or asked.max_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
        }
        for name, value in numbers.items():
            if isinstance(value, int | float):
                self._span.set_attribute(f"gen_ai.request.{name}", value)

    @contextlib.contextmanager
    def attempt(self, instance: str) -> Iterator[SpanOfAttempt]:
        span = self._tracer.start_span(
            f"attempt {instance}",
            set_span_in_context(self._span),
            SpanKind.CLIENT,
            {"afd.instance": instance},
        )
        try:
            yield SpanOfAttempt(span, steps=self._steps and self._plain)
        except Exception as error:
            span.set_status(StatusCode.ERROR, str(error))
            raise
        finally:
            span.end()

    def end(self, code: int) -> None:
        """code: HTTP status; 499: the client went away first."""
        self._span.set_attribute("http.response.status_code", code)
        if code >= 500:
            self._span.set_attribute("error.type", str(code))
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class Spans:
    """Makes the spans of a gateway process and sends them to ``endpoint``.

    Raises ConfigError if a package is missing.
    """

    def __init__(self, endpoint: str, settings: GatewaySettings) -> None:
        self._provider = make_provider(endpoint, settings.instance, settings.otlp_share)
        self._tracer = self._provider.get_tracer("afd.gateway")
        self._steps = settings.trace_steps

    async def run(self, _: web.Application) -> AsyncIterator[None]:
        """Sends what is left at the end."""
        yield
        await asyncio.to_thread(shutdown, self._provider)

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Makes the span of each request that an engine works for."""
        if not takes_a_turn(request):
            return await handler(request)
        trace = SpanOfRequest(self._tracer, request, steps=self._steps)
        request[TRACE] = trace
        response = None
        try:
            response = await handler(request)
            return response
        finally:
            trace.end(final_status(request, response))


def with_parent(body: bytes, traceparent: str) -> bytes:
    """Returns a request's body with ``traceparent`` among its ``vllm_xargs``; unchanged if it is
    no JSON object."""
    text = body.strip()
    if b'"vllm_xargs"' not in text:
        if not (text.startswith(b"{") and text.endswith(b"}") and b":" in text):
            return body
        added = json.dumps({"vllm_xargs": {PARENT: traceparent}}, separators=(",", ":"))
        return text[:-1] + b"," + added[1:].encode()
    if len(body) > MAX_BODY_BYTES:
        return body
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return body
    if not isinstance(fields, dict) or not isinstance(fields.get("vllm_xargs"), dict | None):
        return body
    fields["vllm_xargs"] = {**(fields.get("vllm_xargs") or {}), PARENT: traceparent}
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
