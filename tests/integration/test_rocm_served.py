"""2A2F with ``device: rocm`` on the stand-in node of tests/rocm_node: `afd serve`, vLLM, all roles.

Receive slots are memory of ``hip:N``, links are ipc, and decode steps are graphs that are replayed
on both sides, through the product's HIP code and a libamdhip64 made for tests. Tensors are host
memory, and vLLM and the experts compute on the CPU, because torch for ROCm is not installed. No AMD
hardware takes part.
"""

import collections
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
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

from afd.control import operator
from afd.control.local_keys import operator_keys
from afd_bench import stand_in_nic
from afd_launch.balance import balance
from afd_launch.come_and_go import Operator

sys.path.insert(0, str(Path(__file__).parents[1] / "rocm_node"))
import node

pytestmark = pytest.mark.serve

TOKENS = 40
"""Of each stream; a replayed step takes 30 to 100 ms here."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = node.build(tmp_path_factory.mktemp("hip"))
    if built is None:
        pytest.skip("g++, which compiles the stand-in node, is not installed")
    return built


@pytest.fixture(scope="module")
def nic(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The libibverbs without hardware."""
    return str(stand_in_nic.build(tmp_path_factory.mktemp("verbs")))


LONG = ("rocm_1A1F", "rocm_ranks", "rocm_routed", "rocm_verbs")


@pytest.fixture(
    scope="module", params=["rocm", *(pytest.param(n, marks=pytest.mark.long) for n in LONG)]
)
def name(request: pytest.FixtureRequest) -> str:
    """Of the deployment."""
    return str(request.param)


@pytest.fixture
def deployment(
    name: str, request: pytest.FixtureRequest, host: Host, library: Path
) -> Iterator[Running]:
    variables = {**node.variables(library), "STAND_IN_LOG": str(library / name)}
    if name == "rocm_verbs":
        variables["FAKE_IBVERBS"] = request.getfixturevalue("nic")
    with environment(**variables):
        yield host.serve(name)


def ffn_instances(deployment: Running) -> list[str]:
    return sorted(m.id for m in deployment.members().members if m.id.startswith("ffn"))


def replayed(deployment: Running) -> int:
    """Returns how many steps attention has replayed; checks that only prefill ran without a
    graph."""
    page = deployment.metrics()
    assert {of["reason"] for of in page.labels("afd_eager_steps_total")} == {"prefill"}
    return int(page.total("afd_graph_steps_total"))


def test_replayed_steps_give_the_tokens_of_colocated_vllm(
    deployment: Running, references: References, library: Path, name: str
) -> None:
    same_tokens(deployment.server, references("qwen3_moe"), "rocm")
    page, ffn = deployment.metrics(), ffn_instances(deployment)
    # One instance has all requests, so it soon has enough of them for depth 3.
    for depth in ("1", "3") if name == "rocm_1A1F" else ("1", "2", "3"):
        assert page.total("afd_graph_steps_total", depth=depth) > 0
    for index, instance in enumerate(ffn):
        assert page.total("afd_graph_steps_total", instance=f"attention-{index}") > 0
        assert page.total("afd_steps_total", instance=instance) > 0
        assert page.total("afd_ffn_graph_captures_total", instance=instance, when="start") > 0
    assert replayed(deployment) > 0
    linked = re.findall(r"joined \(session \d+, (\w+)\)", deployment.server.log.read_text())
    log = library / name
    if name == "rocm_verbs":
        assert set(linked) == {"verbs"}
        assert not log.exists(), "only the NIC reaches the memory of the other side"
        return
    assert set(linked) == {"ipc"}
    imports = collections.Counter(line.split()[0] for line in log.read_text().splitlines())
    assert list(imports.values()) == [len(ffn)] * 2 * len(ffn), "each maps all peers' GPU memory"


def test_an_ffn_instance_killed_in_replayed_steps_loses_no_request(deployment: Running) -> None:
    victim = ffn_instances(deployment)[-1]
    wanted = tokens_when_whole(start_streams(deployment.url, 4, TOKENS), 60)
    before, steps = deployment.generation(victim), replayed(deployment)
    streams = start_streams(deployment.url, 4, TOKENS)
    all_begun(streams)
    os.kill(deployment.member(victim).pid, signal.SIGKILL)
    wait_until(lambda: deployment.generation(victim) != before, 10, f"{victim} has ended")
    assert tokens_when_whole(streams, 180) == wanted
    wait_until(deployment.is_whole, HEALTH_S, "the instance is back")
    assert replayed(deployment) - steps > TOKENS / 2  # steps after the kill are replayed too


@pytest.mark.long
@pytest.mark.parametrize("name", ["rocm_routed"], indirect=True)
def test_experts_move_between_replayed_steps(deployment: Running) -> None:
    control = deployment.server.control
    wanted = tokens_when_whole(start_streams(deployment.url, 4, TOKENS, name="moves"), 60)
    steps = replayed(deployment)
    streams = start_streams(deployment.url, 4, TOKENS, name="moves")
    all_begun(streams)
    contract = operator.contract(control)
    assert contract is not None
    table = balance([float(e % 3) for e in range(contract.num_experts)], contract.expert_slots)
    assert table not in contract.expert_map
    layers = len(contract.moe_layers)
    operator.move_experts(control, tables=(table,) * layers)
    wait_until(lambda: not deployment.members().moves_left, 60, "the experts have moved")
    assert [move.experts for move in deployment.members().moved] == [table] * layers
    assert min(len(s.tokens) for s in streams) < TOKENS, "all requests had ended before"
    assert tokens_when_whole(streams, 60) == wanted
    assert replayed(deployment) - steps > TOKENS


@pytest.mark.long
@pytest.mark.parametrize("name", ["rocm_grow"], indirect=True)
def test_an_ffn_instance_comes_and_goes_between_replayed_steps(deployment: Running) -> None:
    """1A1F to 1A2F and back. Both graphs of a step are replayed with one FFN instance and two."""
    control = deployment.server.control
    instances = Operator(control, operator_keys(control), 180)
    wanted = tokens_when_whole(start_streams(deployment.url, 4, TOKENS, name="grows"), 60)

    def same_under_load(change: Callable[[], object]) -> None:
        steps, streams = (
            replayed(deployment),
            start_streams(deployment.url, 4, TOKENS, name="grows"),
        )
        all_begun(streams)
        change()
        assert tokens_when_whole(streams, 180) == wanted
        again = start_streams(deployment.url, 4, TOKENS, name="grows")
        assert tokens_when_whole(again, 60) == wanted
        assert replayed(deployment) - steps > TOKENS

    def rows(member: str) -> float:
        return sum(deployment.metrics().values("afd_expert_rows_total", instance=member))

    same_under_load(lambda: instances.add("ffn"))
    assert rows("ffn-1") > 0
    same_under_load(lambda: os.kill(deployment.member("ffn-1").pid, signal.SIGKILL))
    same_under_load(lambda: instances.remove("ffn-1"))
    assert deployment.members().find("ffn", 1) is None
    assert not deployment.total("afd_ffn_graph_captures_total", when="after")


@pytest.mark.long
@pytest.mark.parametrize("name", ["rocm_ngram"], indirect=True)
def test_speculation_gives_the_tokens_of_colocated_vllm(
    deployment: Running, references: References
) -> None:
    """As on every GPU, a step is replayed only if each of its requests has all of its drafts."""
    same_tokens(deployment.server, references("qwen3_moe"), "ngram")
    assert deployment.total("vllm:spec_decode_num_accepted_tokens_total") > 0
