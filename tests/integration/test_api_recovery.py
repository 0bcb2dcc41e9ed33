"""Under load: the only FFN instance dies, and the deployment drains or is told to stop.

test_faults.py has the other faults.
"""

import os
import signal
import time
import urllib.error
import urllib.request

import psutil
import pytest
from deployments import Host
from helpers import (
    Running,
    all_begun,
    answers,
    start_streams,
    tokens_when_whole,
    wait_until,
)

from afd.control import operator

pytestmark = pytest.mark.serve


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("openai")


def test_killed_ffn_instance_loses_nothing(deployment: Running) -> None:
    """FFN instances hold no request state: the restarted one gets the unanswered messages again."""
    wanted = tokens_when_whole(start_streams(deployment.url, 8, 80), 60)
    before = deployment.member("ffn-0")
    retries = deployment.total("afd_ffn_retries_total")
    streams = start_streams(deployment.url, 8, 80)
    all_begun(streams)
    os.kill(before.pid, signal.SIGKILL)
    assert tokens_when_whole(streams, 90) == wanted
    after = deployment.member("ffn-0")
    assert after.pid != before.pid and after.generation > before.generation
    assert deployment.total("afd_ffn_retries_total") > retries
    assert "ffn-0 was killed by SIGKILL; starting it again" in deployment.server.log.read_text()


def test_a_drain_refuses_new_requests_and_survives_an_ffn_crash(deployment: Running) -> None:
    wanted = tokens_when_whole(start_streams(deployment.url, 4, 100), 60)
    before = deployment.member("ffn-0")
    streams = start_streams(deployment.url, 4, 100)
    all_begun(streams)
    models = f"{deployment.url}/v1/models"
    operator.drain(deployment.server.control)
    try:
        wait_until(lambda: not answers(models), 10, "the gateway refuses new requests")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(models, timeout=5)
        assert refused.value.code == 503 and int(refused.value.headers["Retry-After"]) > 0
        os.kill(before.pid, signal.SIGKILL)
        assert tokens_when_whole(streams, 90) == wanted
        assert deployment.member("ffn-0").generation > before.generation
        assert deployment.members().draining
    finally:
        operator.drain(deployment.server.control, on=False)
    wait_until(lambda: answers(models), 10, "the gateway takes requests again")


@pytest.mark.long  # test_faults_long.py has it under load
def test_sigterm_to_vllm_itself_loses_nothing(deployment: Running) -> None:
    """vLLM ends its engine and then waits for its open connections, which say nothing more. The
    gateway gives them up; begun and new requests wait for the restarted instance."""
    wanted = tokens_when_whole(start_streams(deployment.url, 4, 300), 60)
    fresh = tokens_when_whole(start_streams(deployment.url, 2, 20, name="fresh"), 60)
    before = deployment.member("attention-0")
    streams = start_streams(deployment.url, 4, 300)
    all_begun(streams)
    os.kill(psutil.Process(before.pid).ppid(), signal.SIGTERM)  # its API server
    wait_until(lambda: deployment.generation("attention-0") is None, 20, "attention-0 has left")
    waiting = start_streams(deployment.url, 2, 20, name="fresh")
    assert tokens_when_whole(streams, 90) == wanted
    assert tokens_when_whole(waiting, 90) == fresh
    after = deployment.member("attention-0")
    assert after.pid != before.pid and after.generation > before.generation


def test_ctrl_c_lets_requests_finish_and_leaves_nothing(deployment: Running) -> None:
    ports = deployment.ports()
    streams = start_streams(deployment.url, 8, 150)
    all_begun(streams)
    os.kill(deployment.server.pid, signal.SIGINT)
    wait_until(lambda: not answers(f"{deployment.url}/health"), 10, "the gateway's port is closed")
    assert any(stream.finish is None for stream in streams), "the requests ended before shutdown"
    tokens_when_whole(streams, 60)
    ended = time.monotonic()
    assert deployment.await_exit(30) == 130
    assert time.monotonic() - ended < 20
    deployment.await_nothing_left(ports, 5)
