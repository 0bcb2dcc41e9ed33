"""Two hosts, cases that take minutes: ./run test tests/integration -m long"""

import time
from pathlib import Path

import pytest
from deployments import Models
from helpers import HEALTH_S, start_streams, tokens_when_whole, wait_until
from machines import why_not
from reference import References, same_tokens
from two_hosts import CONTROL, GATEWAY, deployed

from afd.control.keys import CurveKeys

pytestmark = [pytest.mark.serve, pytest.mark.long]

_REASON = why_not()
if _REASON is not None:
    pytest.skip(_REASON, allow_module_level=True)


def test_each_host_comes_back_and_serves_whole(
    tiny_models: Models, tmp_path: Path, references: References
) -> None:
    """Backend auto: shm inside a host, tcp between hosts. Host b, then the control plane's host,
    lose their power; the deployment is whole again, with all instances and the same tokens."""
    model = tiny_models("qwen3_moe")
    with deployed(tmp_path, model, transport={"backend": "auto"}) as hosts:
        for name in ("a", "b"):
            hosts.serve(name)
        with hosts.machines["a"].inside():
            for lost in (None, "b", "a"):
                if lost is not None:
                    hosts.runs[lost].kill()
                    hosts.serve(lost)
                for run in hosts.runs.values():
                    run.says("ready after", HEALTH_S)
                hosts.await_whole()
                same_tokens(hosts.server(), references("qwen3_moe"), f"after {lost}")
        joined = hosts.runs["a"].text()
        assert "attention-0 joined" in joined and ", shm)" in joined and ", tcp)" in joined


def test_ranks_meet_on_their_own_host(
    tiny_models: Models, tmp_path: Path, references: References
) -> None:
    """FFN instances of two ranks, one on each host."""
    model = tiny_models("qwen3_moe")
    with deployed(tmp_path, model, ffn={"instances": 2, "tp": 2}) as hosts:
        for name in ("a", "b"):
            hosts.serve(name)
        hosts.runs["a"].says("ready after", HEALTH_S)
        with hosts.machines["a"].inside():
            hosts.await_whole(members=7)
            same_tokens(hosts.server(), references("qwen3_moe"), "ranks")
            spaces = {m.id: m.pid_space for m in hosts.members().members}
        assert spaces["ffn-0"] == spaces["ffn-0.1"] != spaces["ffn-1"] == spaces["ffn-1.1"]


def test_a_wrong_set_up_ends_at_once_and_names_the_host(
    tiny_models: Models, tmp_path: Path
) -> None:
    model = tiny_models("qwen3_moe")
    with deployed(tmp_path, model, deadlines={"hosts_s": 12}) as hosts:
        a = hosts.serve("a")
        a.says(" s, waiting for host b (attention-1, ffn-1)", 30)
        other = hosts.serve("b", "--set", "pipeline.depth=2")
        other.says("error: pipeline.depth is 2 on host b, but 3 on host a; give every host", 20)
        CurveKeys.generate().save(tmp_path / "other.keys")
        stranger = hosts.serve("b", "--set", "control.keys=other.keys")
        stranger.says("give every role the same control.keys file; the one here is", 20)
        wait_until(lambda: a.process.poll() is not None, 20, "a gives up")
        assert "error: host b did not come within 12 s (deadlines.hosts_s): pipeline" in a.text()
        assert CONTROL not in a.text().splitlines()[-1]
        for run in (other, stranger):
            wait_until(lambda run=run: run.process.poll() == 1, 20, "it ends with status 1")
        wrong = hosts.serve("a", "--host", "b")
        wrong.says("which is not one of this machine (10.77.0.1)", 20)


def test_streams_wait_for_a_short_outage_of_the_network(
    tiny_models: Models, tmp_path: Path
) -> None:
    """Three cuts shorter than the control plane's timeout: nothing is dropped."""
    with deployed(tmp_path, tiny_models("qwen3_moe")) as hosts:
        for name in ("a", "b"):
            hosts.serve(name)
        hosts.runs["a"].says("ready after", HEALTH_S)
        with hosts.machines["a"].inside():
            hosts.await_whole()
            wanted = tokens_when_whole(start_streams(GATEWAY, 4, 150, name="short"), 60)
            before = {m.id: m.generation for m in hosts.members().members}
            streams = start_streams(GATEWAY, 4, 150, name="short")
            for _ in range(3):
                hosts.machines["b"].cut()
                time.sleep(0.4)
                hosts.machines["b"].mend()
                time.sleep(0.4)
            assert tokens_when_whole(streams, 60) == wanted
            assert {m.id: m.generation for m in hosts.members().members} == before
