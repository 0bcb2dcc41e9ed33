"""Spans of steps: which requests they belong to, and what is below them."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_trace import FakeTrace
from otlp_collector import collector

from afd.config.deployment import Deployment
from afd.config.roles import RoleSpec
from afd.errors import ConfigError
from afd.metrics import otlp
from afd.metrics.otlp import PARENT, make_provider
from afd.metrics.role import RoleMetrics
from afd.metrics.step_trace import Span, StepTrace
from afd.wire.layout import Kind
from afd.wire.message import message
from attention_worker.step_spans import FfnCall, StepRequests, StepSpans, ffn_calls
from attention_worker.vllm_hooks.command import attention_command

Models = Callable[[str], Path]
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def parent(number: int) -> str:
    return f"00-{TRACE}-{number:016x}-01"


def step(began: int, rows: int = 4) -> StepTrace:
    """Two layers, two micro-batches; 100 ns a piece."""
    spans = [
        Span(layer, batch, rows, at, at + 80, at + 90)
        for i, (layer, batch) in enumerate([(3, 0), (3, 1), (4, 0), (4, 1)])
        for at in [began + 100 * i]
    ]
    return StepTrace(began, began + 500, False, tuple(spans))


class Answers(FakeTrace):
    """Answers of one FFN rank. answers: (posted, arrived; layer, micro-batch)."""

    def __init__(self, answers: list[tuple[int, int, int, int]]) -> None:
        super().__init__()
        self._answers = answers

    def events(self) -> list[tuple[int, int, int, int, bytes, int, int]]:
        return [
            (posted, posted + 1, arrived, arrived + 2,
             message(0, [], 4, layer=layer, micro_batch=batch, depth=2, kind=Kind.DATA).user, 4, 64)
            for posted, arrived, layer, batch in self._answers
        ]  # fmt: skip


def test_a_step_has_the_traced_requests_that_it_served() -> None:
    requests = StepRequests()
    requests.began("a", {PARENT: parent(1)})
    requests.began("b", None)
    requests.began("c", {PARENT: 3})
    before = time.monotonic_ns()
    requests.step(["a", "b", "c"])
    first = time.monotonic_ns()
    requests.finished(["a", "b"])
    requests.step(["a", "c"])
    assert requests.parents_at(before) == ()
    assert requests.parents_at(first) == (parent(1),)
    assert requests.parents_at(time.monotonic_ns()) == ()  # a later step without any


def test_calls_end_with_the_answer_of_each_rank() -> None:
    trace = step(1000)
    event = (1150, 1151, 1160, 1162, 3, 0, 4, 64)
    other = (*event[:2], 1170, 1172, *event[4:])
    late = (1900, 1901, 1910, 1912, 3, 1, 4, 64)  # of another step
    calls = ffn_calls(trace, {"ffn-0": [event, late], "ffn-1": [other]})
    assert calls == [
        FfnCall("ffn-0", 3, 0, 4, 1080, 1160, 1150),
        FfnCall("ffn-1", 3, 0, 4, 1080, 1170, 1150),
        FfnCall("ffn", 3, 1, 4, 1180, 1300),
        FfnCall("ffn", 4, 0, 4, 1280, 1500),
        FfnCall("ffn", 4, 1, 4, 1380, 1500),
    ]


def test_one_trace_shows_a_requests_steps_and_their_ffn_calls() -> None:
    metrics, requests = RoleMetrics("attention"), StepRequests()
    requests.began("a", {PARENT: parent(1)})
    requests.began("b", {PARENT: parent(2)})
    requests.began("c", {PARENT: f"00-{TRACE}-{3:016x}-00"})  # not sampled
    requests.step(["a", "b", "c"])
    now = time.monotonic_ns()
    metrics.step_traces.add(step(now))
    metrics.wire_traces["ffn-0"] = Answers([(now + 85, now + 95, 3, 0)])
    with collector() as seen:
        spans = StepSpans(make_provider(seen.url, "attention-0"), metrics, requests)
        spans.export()
        spans.export()  # makes no step twice
        spans.close()
        seen.wait(6)
    first, second = sorted(seen.named("step"), key=lambda span: span.parent)
    assert [first.parent, second.parent] == [f"{1:016x}", f"{2:016x}"]
    assert {span.trace for span in seen.spans} == {TRACE}
    assert second.links == (first.id,)
    assert first.facts["afd.depth"] == 2 and first.facts["afd.rows"] == 8
    assert first.ended_ns - first.began_ns == 500
    assert abs(first.began_ns - time.time_ns()) < 60e9
    calls = [span for span in seen.spans if span.parent == first.id]
    assert [span.name for span in calls] == [
        "ffn-0 layer 3", "ffn layer 3", "ffn layer 4", "ffn layer 4",
    ]  # fmt: skip
    assert calls[0].facts == {
        "afd.member": "ffn-0", "afd.layer": 3, "afd.micro_batch": 0, "afd.rows": 4,
    }  # fmt: skip
    assert len(seen.spans) == 6


def test_vllm_gets_the_address(tiny_models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "find_spec", lambda name: object())
    url = "http://10.0.0.1:4318/v1/traces"
    argv, environment = attention_command(_role(tiny_models("qwen3_moe"), otlp=url), {})
    assert f"--otlp-traces-endpoint={url}" in argv
    assert environment["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == "http/protobuf"
    assert environment["OTEL_SERVICE_NAME"] == "attention-0"
    argv, environment = attention_command(_role(tiny_models("qwen3_moe")), {})
    assert not [word for word in argv if "otlp" in word]
    assert not [name for name in environment if name.startswith("OTEL")]


def test_a_missing_package_is_named_with_the_extra(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(otlp, "find_spec", lambda name: None if "grpc" in name else object())
    with pytest.raises(ConfigError, match=r"grpc is missing; .* pip install 'afd\[otel\]'"):
        attention_command(
            _role(tiny_models("qwen3_moe"), otlp="http://127.0.0.1:4318/v1/traces"), {}
        )


def _role(model: Path, **metrics: object) -> RoleSpec:
    deployment = Deployment.from_plain({"model": str(model), "metrics": metrics})
    return RoleSpec("attention", 0, deployment, "tcp://127.0.0.1:1", api_port=1)
