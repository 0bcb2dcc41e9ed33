"""One trace shows a request from the gateway through vLLM to the FFN calls of its steps."""

import json
import urllib.request
from pathlib import Path

import pytest
from deployments import SETTINGS, Models
from helpers import wait_until
from otlp_collector import Seen, collector

from afd.errors import ConfigError
from afd.metrics.otlp import VLLM_PACKAGES, check_packages
from afd_bench.servers import disaggregated

pytestmark = [pytest.mark.serve, pytest.mark.long]

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TOKENS = 6


def test_one_trace_shows_the_steps_of_a_request(tiny_models: Models, tmp_path: Path) -> None:
    try:
        check_packages(VLLM_PACKAGES)
    except ConfigError as error:
        pytest.skip(str(error))
    with collector() as seen:
        deployment: dict[str, object] = {
            "model": str(tiny_models("qwen3_moe")),
            "attention": SETTINGS,
            "ffn": {"instances": 2},
            "wire": {"dispatch": "broadcast"},  # both ranks take part in every call
            "metrics": {"otlp": seen.url, "stage_every": 1},
        }
        with disaggregated(deployment, log=tmp_path / "log") as server:
            body = {
                "model": server.model,
                "prompt": "a b c",
                "max_tokens": TOKENS,
                "temperature": 0,
            }
            request = urllib.request.Request(
                f"{server.url}/v1/completions",
                json.dumps({**body, "ignore_eos": True, "stream": True}).encode(),
                {
                    "Content-Type": "application/json",
                    "traceparent": f"00-{TRACE}-{CALLER}-01",
                },
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                said = answer.read()
            assert b"afd_trace" not in said
            wait_until(
                lambda: len(seen.named("step")) >= TOKENS and seen.named("llm_request"),
                20,
                "the spans arrive",
            )
        spans = [span for span in seen.spans if span.trace == TRACE]
    by_id = {span.id: span for span in spans}

    def above(span: Seen) -> list[str]:
        """Returns the names from a span up to the caller's."""
        names = [span.name]
        while span.parent != CALLER:
            span = by_id[span.parent]
            names.append(span.name)
        return names

    steps = [span for span in spans if span.name == "step"]
    assert len(steps) == TOKENS  # the prefill is one of them
    calls = [span for span in spans if "afd.layer" in span.facts]
    assert {call.facts["afd.member"] for call in calls} == {"ffn-0", "ffn-1"}
    layers = {call.facts["afd.layer"] for call in calls}
    assert len(calls) == TOKENS * len(layers) * 2
    way = ["step", "attempt attention-0", f"text_completion {server.model}"]
    assert all(above(call)[1:] == way for call in calls)
    (engine,) = [span for span in spans if span.name == "llm_request"]
    assert above(engine) == ["llm_request", *way[1:]]
    assert engine.service == steps[0].service == "attention-0"
    for call in calls:
        step = by_id[call.parent]
        assert step.began_ns <= call.began_ns <= call.ended_ns <= step.ended_ns
