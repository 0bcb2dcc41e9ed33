"""2A1F with an FFN instance of two ranks, and speculation: tokens equal colocated vLLM's.

A rank is killed, then the supervisor."""

import os
import signal

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
    accepted_tokens = "vllm:spec_decode_num_accepted_tokens_total"
    page = deployment.metrics(having=accepted_tokens)
    steps = [page.total("afd_steps_total", instance=name) for name in ("ffn-0", "ffn-0.1")]
    assert steps[0] == steps[1] > 0
    accepted = page.total(accepted_tokens)
    assert accepted > 0, "no draft token was accepted"
    held = [page.total("afd_weights_held_bytes", instance=n) for n in ("ffn-0", "ffn-0.1")]
    assert held[0] == held[1] > 0


def test_a_killed_rank_loses_no_request(deployment: Running) -> None:
    """Kills the leader; tests/unit/ffn/test_ranks.py kills followers."""
    wanted = tokens_when_whole(start_streams(deployment.url, 6, 100), 180)
    before = deployment.member("ffn-0.1").generation
    streams = start_streams(deployment.url, 6, 100)
    all_begun(streams)
    os.kill(deployment.member("ffn-0").pid, signal.SIGKILL)
    wait_until(lambda: deployment.generation("ffn-0.1") != before, 10, "ffn-0.1 has ended too")
    done = [len(stream.tokens) for stream in streams]
    assert tokens_when_whole(streams, 180) == wanted
    assert min(done) < 100, "all requests had ended before the rank was killed"
    wait_until(deployment.is_whole, HEALTH_S, "the instance is back")


def test_killed_supervisor_leaves_nothing(deployment: Running) -> None:
    """kill -9 under load: only the watchdog is left to end the processes and clean up."""
    ports = deployment.ports()
    streams = start_streams(deployment.url, 4, 800)
    all_begun(streams)
    os.kill(deployment.server.pid, signal.SIGKILL)
    assert deployment.await_exit(10) == -signal.SIGKILL
    deployment.await_nothing_left(ports, 15)
    for stream in streams:
        stream.join(10)
        assert stream.error is not None
