"""2A2F with ``device: rocm`` on the stand-in node of tests/rocm_node: `afd serve`, vLLM, all roles.

Receive slots are memory of ``hip:N`` and links are ipc, through the product's HIP code and a
libamdhip64 made for tests. Tensors are host memory, and vLLM and the experts compute on the CPU,
because torch for ROCm is not installed. No AMD hardware takes part.
"""

import collections
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import Host
from helpers import (
    HEALTH_S,
    Running,
    all_begun,
    environment,
    start_streams,
    tokens_when_whole,
    wait_until,
)
from reference import References, same_tokens

sys.path.insert(0, str(Path(__file__).parents[1] / "rocm_node"))
import node

pytestmark = pytest.mark.serve


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = node.build(tmp_path_factory.mktemp("hip"))
    if built is None:
        pytest.skip("g++, which compiles the stand-in node, is not installed")
    return built


@pytest.fixture
def deployment(host: Host, library: Path) -> Iterator[Running]:
    with environment(**node.variables(library), STAND_IN_LOG=str(library / "log")):
        yield host.serve("rocm")


def test_tokens_are_those_of_colocated_vllm(
    deployment: Running, references: References, library: Path
) -> None:
    same_tokens(deployment.server, references("qwen3_moe"), "rocm")
    imports = (library / "log").read_text().split("\n")[:-1]
    by_process = collections.Counter(line.removesuffix(" imported") for line in imports)
    assert sorted(by_process.values()) == [2, 2, 2, 2], "each side maps two peers' GPU memory"
    page = deployment.metrics()
    for instance in ("attention-0", "attention-1", "ffn-0", "ffn-1"):
        assert page.total("afd_steps_total", instance=instance) > 0


def test_a_killed_ffn_instance_loses_no_request(deployment: Running) -> None:
    wanted = tokens_when_whole(start_streams(deployment.url, 4, 100), 60)
    before = deployment.generation("ffn-1")
    streams = start_streams(deployment.url, 4, 100)
    all_begun(streams)
    os.kill(deployment.member("ffn-1").pid, signal.SIGKILL)
    wait_until(lambda: deployment.generation("ffn-1") != before, 10, "ffn-1 has ended")
    assert tokens_when_whole(streams, 180) == wanted
    wait_until(deployment.is_whole, HEALTH_S, "the instance is back")
