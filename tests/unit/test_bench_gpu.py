"""`afd bench gpu`: what it deploys, and how it reads counters. The runs need GPUs: tests/gpu."""

import asyncio
import time
from pathlib import Path

import pytest

from afd.bench import gpu
from afd.bench.gpu import Variant, deployment, sample_sum
from afd.config import Deployment
from afd.errors import AfdError
from afd.resolve import replays

EXPOSITION = """\
# TYPE afd_graph_steps counter
afd_graph_steps_total{depth="1",instance="attention-0"} 5
afd_graph_steps_total{depth="3",instance="attention-0"} 7
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",instance="attention-0"} 2
vllm:num_requests_running{engine="0",instance="attention-1"} 3
"""


@pytest.mark.parametrize("wire", ["exact", "fp8"])
@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_deployed_is_a_valid_deployment(wire, graphs):
    plain = deployment(Path("m"), Variant(wire, graphs), 3, ["--max-logprobs=9"])
    config = Deployment.from_plain(plain)
    assert replays(config) is graphs and config.wire.format == wire
    assert config.attention.vllm_args[-1] == "--max-logprobs=9"


def test_samples_are_summed_over_instances_and_picked_by_depth():
    assert sample_sum(EXPOSITION, "afd_graph_steps_total", 3) == 7
    assert sample_sum(EXPOSITION, "afd_graph_steps_total", 2) == 0
    assert sample_sum(EXPOSITION, "vllm:num_requests_running") == 5


class FakeServer:
    """Decodes for as long as a request takes: a step of 4 ms on the device every 5 ms."""

    url, model = "http://nowhere", "m"

    def __init__(self, replays: bool) -> None:
        self.replays = replays
        self.began = 0.0
        self.running = 0

    async def complete(self, session, url, body):
        self.began = self.began or time.monotonic()
        self.running += 1
        await asyncio.sleep(1.0)
        self.running -= 1
        return {}

    def metrics(self) -> str:
        steps = int((time.monotonic() - self.began) / 0.005) if self.began and self.replays else 0
        return (
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running {self.running}\n"
            "# TYPE afd_graph_steps counter\n"
            f'afd_graph_steps_total{{depth="2"}} {steps}\n'
            "# TYPE afd_graph_step_seconds counter\n"
            f'afd_graph_step_seconds_total{{depth="2"}} {steps * 0.004}\n'
        )


def test_steps_are_timed_while_all_requests_decode(monkeypatch):
    server = FakeServer(replays=True)
    monkeypatch.setattr(gpu, "post_completion", server.complete)
    timing = gpu.steady_decode(server, batch=3, prompt=4, tokens=100, depth=2)
    assert timing.steps >= 50
    assert timing.device_s == pytest.approx(0.004)
    assert timing.step_s == pytest.approx(0.005, rel=0.1)


def test_a_depth_at_which_nothing_was_replayed_is_an_error(monkeypatch):
    server = FakeServer(replays=False)
    monkeypatch.setattr(gpu, "post_completion", server.complete)
    with pytest.raises(AfdError, match="no step was replayed at depth 2"):
        gpu.steady_decode(server, batch=1, prompt=4, tokens=100, depth=2)
