"""2A1F whose FFN instance is two ranks: the tokens of colocated vLLM, and a rank that is killed."""

import os
import signal
import time

import pytest
from deployments import Host
from helpers import HEALTH_S, Running, all_begun, start_streams, tokens_when_whole, wait_until
from reference import References, same_tokens

pytestmark = pytest.mark.serve


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("ranks")


def test_tokens_are_those_of_colocated_vllm(deployment: Running, references: References) -> None:
    same_tokens(deployment.server, references("qwen3_moe"), "ranks")
    page = deployment.metrics()
    steps = [page.total("afd_steps_total", instance=name) for name in ("ffn-0", "ffn-0.1")]
    assert steps[0] == steps[1] > 0
    held = [page.total("afd_weights_held_bytes", instance=n) for n in ("ffn-0", "ffn-0.1")]
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("name", ["ffn-0.1", "ffn-0"])
def test_a_killed_rank_loses_no_request(deployment: Running, name: str) -> None:
    """ffn-0.1 follows; ffn-0 leads the step."""
    wanted = tokens_when_whole(start_streams(deployment.url, 6, 200), 60)
    before = {n: deployment.member(n).generation for n in ("ffn-0", "ffn-0.1")}
    streams = start_streams(deployment.url, 6, 200)
    all_begun(streams)
    os.kill(deployment.member(name).pid, signal.SIGKILL)
    killed = time.monotonic()
    partner = "ffn-0" if name == "ffn-0.1" else "ffn-0.1"
    wait_until(
        lambda: deployment.generation(partner) != before[partner], 10, f"{partner} has ended too"
    )
    print(f"{partner} was gone {time.monotonic() - killed:.1f} s after {name} was killed")
    assert tokens_when_whole(streams, 90) == wanted
    wait_until(deployment.is_whole, HEALTH_S, "the instance is back")
