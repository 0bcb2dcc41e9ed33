"""Step-3, 1A1F: tokens equal colocated vLLM's; a killed supervisor leaves nothing behind."""

import os
import signal

import pytest
from deployments import Host, Models
from helpers import Running, all_begun, start_streams
from reference import References, same_tokens, weights_are_apart

pytestmark = pytest.mark.serve


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("step3")


def test_tokens_are_those_of_colocated_vllm(deployment: Running, references: References) -> None:
    same_tokens(deployment.server, references("step3"), "step3")


def test_each_side_has_its_own_weights_only(deployment: Running, tiny_models: Models) -> None:
    weights_are_apart(deployment.metrics(), tiny_models("step3"), ffn_instances=1)


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
