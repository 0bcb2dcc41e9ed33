"""Attention instances of two and four ranks (``attention.tp``): tokens equal colocated vLLM's.
Ranks and FFN instances are killed under load.

    ./run test -m long tests/integration/test_served_attention_ranks.py
"""

import os
import signal
import urllib.request

import pytest
from deployments import Host
from helpers import (
    HEALTH_S,
    Running,
    Scrape,
    all_begun,
    start_streams,
    tokens_when_whole,
    wait_until,
)
from reference import References, same_tokens

pytestmark = [pytest.mark.serve, pytest.mark.long]


@pytest.fixture(params=[1, 2], ids=["1A1F", "2A1F"])
def deployment(host: Host, request: pytest.FixtureRequest) -> Running:
    return host.serve(f"tp_{request.param}A1F")


def sent_bytes(deployment: Running, member: str) -> float:
    with urllib.request.urlopen(deployment.member(member).metrics_url, timeout=5) as answer:
        return Scrape(answer.read().decode()).total("afd_wire_bytes_total", direction="a2f")


def test_tokens_are_those_of_colocated_vllm(deployment: Running, references: References) -> None:
    for depth in (3, 2, 1):
        deployment.server.set_depth(depth)
        same_tokens(deployment.server, references("qwen3_moe"), f"depth {depth}")
    assert deployment.total("afd_late_peers_total") == 0
    shares = [sent_bytes(deployment, member) for member in ("attention-0", "attention-0.1")]
    assert 0.7 < shares[1] / shares[0] <= 1.05, shares


def test_two_ffn_instances(host: Host, references: References) -> None:
    server = host.serve("tp_2A2F").server
    same_tokens(server, references("qwen3_moe"), "2A2F")


def test_four_ranks(host: Host, references: References) -> None:
    """The tiny model has fewer KV heads than ranks: vLLM gives a head to several of them."""
    server = host.serve("tp_4_ranks").server
    for depth in (3, 1):
        server.set_depth(depth)
        same_tokens(server, references("qwen3_moe"), f"depth {depth}")


def killed(deployment: Running, member: str) -> None:
    """Kills a member under load: no request fails, and no token changes."""
    wanted = tokens_when_whole(start_streams(deployment.url, 6, 120), 60)
    before = deployment.generation("attention-0")
    streams = start_streams(deployment.url, 6, 120)
    all_begun(streams)
    os.kill(deployment.member(member).pid, signal.SIGKILL)
    if member.startswith("attention"):
        wait_until(
            lambda: deployment.generation("attention-0") != before, 30, "attention-0 has ended too"
        )
    assert tokens_when_whole(streams, 180) == wanted
    wait_until(deployment.is_whole, HEALTH_S, f"{member} is back")


def test_a_killed_rank_loses_no_request(deployment: Running) -> None:
    killed(deployment, "attention-0.1")


def test_a_killed_ffn_instance_loses_no_request(deployment: Running) -> None:
    killed(deployment, "ffn-0")
    assert deployment.generation("attention-0.1") is not None
