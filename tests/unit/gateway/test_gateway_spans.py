"""Spans of the gateway, what it sends upstream, and a collector that is away."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest
from gateway_fakes import QUICK, FakeInstance, rig, run
from otlp_collector import collector

from afd.metrics.otlp import PARENT
from afd_gateway.settings import GatewaySettings
from afd_gateway.spans import with_parent

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ASKED = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "secret"}]}


def traced(url: str, **more: object) -> GatewaySettings:
    return replace(QUICK, otlp=url, trace_steps=True, **more)


def ask(
    settings: GatewaySettings, *instances: FakeInstance, headers: dict[str, str] | None = None
) -> list[int]:
    """Sends one chat request; returns its status, and the number of requests per instance."""

    async def work() -> list[int]:
        async with rig(*instances, settings=settings) as gw:
            url = f"{gw.url}/v1/chat/completions"
            async with gw.client.post(url, json=ASKED, headers=headers) as answer:
                await answer.read()
                status = answer.status
            async with gw.client.get(f"{gw.url}/v1/models") as answer:
                await answer.read()
        return [status, *(len(instance.bodies) for instance in instances)]

    return run(work())


def upstream_headers(instance: FakeInstance) -> dict[str, str]:
    return {key.lower(): value for key, value in instance.seen[0].headers.items()}


def test_spans_continue_the_callers_trace_upstream() -> None:
    instance = FakeInstance()
    with collector() as seen:
        headers = {"Traceparent": f"00-{TRACE}-{CALLER}-01", "Tracestate": "vendor=1"}
        assert ask(traced(seen.url), instance, headers=headers)[0] == 200
        spans = seen.wait(2)
    assert len(spans) == 2  # GET /v1/models makes no engine work
    (request,), (attempt,) = seen.named("chat tiny"), seen.named("attempt attention-0")
    assert (request.trace, request.parent) == (TRACE, CALLER)
    assert (attempt.trace, attempt.parent) == (TRACE, request.id)
    assert request.service == "gateway-0"
    assert request.facts == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "afd",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
    }
    assert "secret" not in str(spans)
    sent = upstream_headers(instance)
    assert sent["traceparent"] == f"00-{TRACE}-{attempt.id}-01"
    assert sent["tracestate"] == "vendor=1"
    body = json.loads(instance.bodies[0])
    assert body == {**ASKED, "vllm_xargs": {PARENT: sent["traceparent"]}}


def test_each_attempt_has_a_span() -> None:
    first, second = FakeInstance("attention-0", die="before"), FakeInstance("attention-1")
    with collector() as seen:
        assert ask(traced(seen.url), first, second)[0] == 200
        seen.wait(3 if first.bodies else 2)
    failed = seen.named("attempt attention-0")
    assert [span.failed for span in failed] == [True]
    (request,), (good,) = seen.named("chat tiny"), seen.named("attempt attention-1")
    assert {failed[0].parent, good.parent} == {request.id}
    assert not (request.failed or request.parent)


@pytest.mark.parametrize(("flag", "share"), [("00", 1.0), ("", 0.0)])
def test_a_request_that_is_not_sampled_has_no_spans(flag: str, share: float) -> None:
    instance = FakeInstance()
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-{flag}"} if flag else {}
    with collector() as seen:
        assert ask(traced(seen.url, otlp_share=share), instance, headers=headers)[0] == 200
    assert seen.spans == []
    flags = int(upstream_headers(instance)["traceparent"].rpartition("-")[2], 16)
    assert not flags & 1  # so vLLM makes none either
    assert json.loads(instance.bodies[0]) == ASKED


def test_without_an_address_the_clients_headers_pass() -> None:
    instance = FakeInstance()
    headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "vendor=1"}
    assert ask(QUICK, instance, headers=headers)[0] == 200
    sent = upstream_headers(instance)
    assert {name: sent[name] for name in headers} == headers
    assert json.loads(instance.bodies[0]) == ASKED


def test_a_dead_collector_delays_no_request_and_little_of_the_end() -> None:
    began = time.monotonic()
    assert ask(traced("http://127.0.0.1:9/v1/traces"), FakeInstance())[0] == 200
    assert time.monotonic() - began < 6.0


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b' {"a":1}\n', {"a": 1, "vllm_xargs": {PARENT: "p"}}),
        (b'{"vllm_xargs":null}', {"vllm_xargs": {PARENT: "p"}}),
        (b'{"vllm_xargs":{"x":"\xc3\xa9"}}', {"vllm_xargs": {"x": "é", PARENT: "p"}}),
        (b'{"a":"\\"vllm_xargs\\""}', {"a": '"vllm_xargs"', "vllm_xargs": {PARENT: "p"}}),
    ],
)
def test_the_parent_is_added_to_a_json_object(body: bytes, expected: object) -> None:
    assert json.loads(with_parent(body, "p")) == expected


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"vllm_xargs":3}', b'{"vllm_xargs":', b"x"])
def test_other_bodies_stay(body: bytes) -> None:
    assert with_parent(body, "p") == body
