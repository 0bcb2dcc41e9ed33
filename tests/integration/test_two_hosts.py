"""Two hosts, 2A2F: the tokens of colocated vLLM, a cut cable, and a host that loses its power.

The hosts are network namespaces. `afd serve FILE --host NAME` runs on each. The tests with the mark
``long`` take minutes and are left out unless they are asked for: ./run test -m long.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from deployments import BLOCK, SETTINGS, Models
from helpers import (
    HEALTH_S,
    all_begun,
    answers,
    start_streams,
    tokens_when_whole,
    wait_until,
)
from machines import Machine, Run, running, two_machines, why_not
from reference import References, same_tokens
from roles import AFD, write_config

from afd.control.keys import CurveKeys
from afd.control.messages import Members
from afd.control.operator import status
from afd_bench.servers import Server

pytestmark = [pytest.mark.serve]

_REASON = why_not()
if _REASON is not None:
    pytest.skip(_REASON, allow_module_level=True)

GATEWAY = "http://127.0.0.1:8000"
CONTROL = "tcp://10.77.0.1:5555"


@dataclass
class TwoHosts:
    """A deployment on machines a and b."""

    machines: dict[str, Machine]
    folder: Path
    config: str
    stack: contextlib.ExitStack
    runs: dict[str, Run]
    keys: CurveKeys
    starts: int = 0

    def serve(self, name: str, *more: str) -> Run:
        self.starts += 1
        log = self.folder / f"{name}{self.starts}.log"
        command = (*AFD, "serve", self.config, "--host", name, *more)
        run = self.stack.enter_context(running(self.machines[name], *command, log=log))
        self.runs[name] = run
        return run

    def members(self) -> Members:
        return status(CONTROL, self.keys.operator)

    def is_whole(self) -> bool:
        for name, run in self.runs.items():
            assert run.process.poll() is None, f"host {name} ended:\n{run.text()[-3000:]}"
        return answers(f"{GATEWAY}/health")

    def await_whole(self, members: int = 5) -> None:
        def whole() -> bool:
            ready = [m for m in self.members().members if m.state == "ready"]
            return len(ready) == members and self.is_whole()

        wait_until(whole, HEALTH_S, "both hosts serve")


@contextlib.contextmanager
def deployed(folder: Path, model: Path, **sections: object) -> Iterator[TwoHosts]:
    """Machines with a deployment file for both; nothing runs yet."""
    keys = CurveKeys.generate()
    keys.save(folder / "control.keys")
    attention = {
        **SETTINGS,
        "instances": 2,
        "max_num_batched_tokens": 128,
        "vllm_args": [BLOCK],
    }
    config: dict[str, object] = {
        "model": str(model),
        "served_model_name": "model",
        "hosts": [{"name": "a", "address": "10.77.0.1"}, {"name": "b", "address": "10.77.0.2"}],
        "attention": attention,
        "ffn": {"instances": 2},
        "pipeline": {"depth": 3, "min_rows": 1},
        "transport": {"backend": "tcp"},
        "control": {"keys": "control.keys", "heartbeat_s": 0.2},
        "deadlines": {"ffn_s": 150, "drain_s": 5},
        **sections,
    }
    path = write_config(folder / "deployment.yaml", config)
    with contextlib.ExitStack() as stack:
        a, b = stack.enter_context(two_machines())
        yield TwoHosts({"a": a, "b": b}, folder, path, stack, {}, keys)


@pytest.fixture(scope="module")
def hosts(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Both hosts serve; one attention and one FFN instance are on each."""
    folder = tmp_path_factory.mktemp("hosts")
    with deployed(folder, tiny_models("qwen3_moe")) as found:
        b = found.serve("b")
        b.says("waiting for host a (control plane, attention-0, ffn-0)", 30)
        a = found.serve("a")
        a.says("ready after", HEALTH_S)
        b.says("ready after", HEALTH_S)
        with found.machines["a"].inside():
            found.await_whole()
            yield found


def server(hosts: TwoHosts) -> Server:
    run = hosts.runs["a"]
    return Server(GATEWAY, "model", run.log, CONTROL, run.process.pid)


def test_tokens_are_those_of_colocated_vllm(hosts: TwoHosts, references: References) -> None:
    same_tokens(server(hosts), references("qwen3_moe"), "two hosts")
    for name, member in (("a", "attention-1"), ("b", "attention-0")):
        assert f"{member} joined" in hosts.runs[name].text()
    places = {m.id: m.pid_space for m in hosts.members().members}
    assert places["ffn-0"] == places["attention-0"] == places["gateway-0"]
    assert places["ffn-1"] == places["attention-1"] != places["ffn-0"]


def test_a_cut_cable_loses_no_token(hosts: TwoHosts) -> None:
    """The control plane drops the members of the other host, which come back with the cable."""
    wanted = tokens_when_whole(start_streams(GATEWAY, 4, 120, name="cut"), 60)
    streams = start_streams(GATEWAY, 4, 120, name="cut")
    all_begun(streams)
    hosts.machines["b"].cut()
    hosts.runs["a"].says("waiting for host b (attention-1, ffn-1)", 20)
    time.sleep(1.0)
    begun = [len(stream.tokens) for stream in streams]
    hosts.machines["b"].mend()
    assert tokens_when_whole(streams, 90) == wanted
    assert min(begun) < 120, "all requests had ended before the cable was cut"
    hosts.runs["a"].says("every host is there again", 20)


def test_a_host_without_power_comes_back(hosts: TwoHosts) -> None:
    """Requests on the other host wait for the FFN instance, and no token is lost."""
    hosts.await_whole()
    wanted = tokens_when_whole(start_streams(GATEWAY, 6, 120, name="power"), 60)
    streams = start_streams(GATEWAY, 6, 120, name="power")
    all_begun(streams)
    hosts.runs["b"].kill()
    done = [len(stream.tokens) for stream in streams]
    hosts.serve("b")
    for stream, tokens in zip(streams, wanted, strict=True):
        stream.join(120)
        if stream.instance == "attention-0":
            assert (stream.error, stream.tokens) == (None, tokens)
    assert {stream.instance for stream in streams} == {"attention-0", "attention-1"}
    assert min(done) < 120, "all requests had ended before the host was killed"
