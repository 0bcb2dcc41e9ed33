"""A deployment that loses its FFN instance under load, and one that is told to stop under load."""

import os
import signal
import time

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

pytestmark = pytest.mark.serve


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("openai")


def loses_nothing_with_an_ffn_instance_after(deployment: Running, number: signal.Signals) -> None:
    """The signal is sent to ffn-0 under load."""
    wanted = tokens_when_whole(start_streams(deployment.url, 8, 150), 60)
    before = deployment.member("ffn-0")
    retries = deployment.metrics().total("afd_ffn_retries_total")
    streams = start_streams(deployment.url, 8, 150)
    all_begun(streams)
    os.kill(before.pid, number)
    assert tokens_when_whole(streams, 90) == wanted
    after = deployment.member("ffn-0")
    assert after.pid != before.pid and after.generation > before.generation
    assert deployment.metrics().total("afd_ffn_retries_total") > retries


def test_killed_ffn_instance_loses_nothing(deployment: Running) -> None:
    """It has no state of a request: restarted, it is sent what it had not answered."""
    loses_nothing_with_an_ffn_instance_after(deployment, signal.SIGKILL)
    assert "ffn-0 was killed by SIGKILL; starting it again" in deployment.server.log.read_text()


def test_stopped_ffn_instance_is_ended_and_loses_nothing(deployment: Running) -> None:
    """Alive, but without a heartbeat: the supervisor does what the test above does by hand."""
    loses_nothing_with_an_ffn_instance_after(deployment, signal.SIGSTOP)
    assert deployment.server.log.read_text().count("ffn-0 stands still") == 1


def test_ctrl_c_lets_requests_finish_and_leaves_nothing(deployment: Running) -> None:
    ports = deployment.ports()
    streams = start_streams(deployment.url, 8, 250)
    all_begun(streams)
    os.kill(deployment.server.pid, signal.SIGINT)
    wait_until(lambda: not answers(f"{deployment.url}/health"), 10, "the gateway's port is closed")
    assert any(stream.finish is None for stream in streams), "the load had ended before"
    tokens_when_whole(streams, 60)
    ended = time.monotonic()
    assert deployment.await_exit(30) == 130
    assert time.monotonic() - ended < 20
    deployment.await_nothing_left(ports, 5)
