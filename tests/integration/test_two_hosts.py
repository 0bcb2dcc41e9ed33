"""Two hosts, 2A2F: the tokens of colocated vLLM, a cut cable, and a host that loses its power.

The hosts are network namespaces. ``afd serve FILE --host NAME`` runs on each. Cases that take
minutes are in test_two_hosts_long.py.
"""

import time
from collections.abc import Iterator

import pytest
from deployments import Models
from helpers import HEALTH_S, Stream, all_begun, start_streams, tokens_when_whole
from machines import why_not
from reference import References, same_tokens
from two_hosts import GATEWAY, TwoHosts, deployed

pytestmark = [pytest.mark.serve]

_REASON = why_not()
if _REASON is not None:
    pytest.skip(_REASON, allow_module_level=True)

TOKENS = 120


@pytest.fixture(scope="module")
def hosts(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    """Both hosts serve; one attention and one FFN instance are on each."""
    with deployed(tmp_path_factory.mktemp("hosts"), tiny_models("qwen3_moe")) as found:
        b = found.serve("b")
        b.says("waiting for host a (control plane, attention-0, ffn-0)", 30)
        a = found.serve("a")
        a.says("ready after", HEALTH_S)
        b.says("ready after", HEALTH_S)
        with found.machines["a"].inside():
            found.await_whole()
            yield found


@pytest.fixture(scope="module")
def wanted(hosts: TwoHosts) -> list[list[int]]:
    """The tokens of :func:`streams` while nothing goes wrong."""
    return tokens_when_whole(streams(), 60)


def streams() -> list[Stream]:
    return start_streams(GATEWAY, 4, TOKENS, name="hosts")


def test_tokens_are_those_of_colocated_vllm(hosts: TwoHosts, references: References) -> None:
    same_tokens(hosts.server(), references("qwen3_moe"), "two hosts")
    for name, member in (("a", "attention-1"), ("b", "attention-0")):
        assert f"{member} joined" in hosts.runs[name].text()
    places = {m.id: m.pid_space for m in hosts.members().members}
    assert places["ffn-0"] == places["attention-0"] == places["gateway-0"]
    assert places["ffn-1"] == places["attention-1"] != places["ffn-0"]


def test_a_cut_cable_loses_no_token(hosts: TwoHosts, wanted: list[list[int]]) -> None:
    """The control plane drops the members of the other host, which come back with the cable."""
    running = streams()
    all_begun(running)
    a = hosts.runs["a"]
    before = len(a.text())  # on a busy machine it waits for host b at its start, too
    hosts.machines["b"].cut()
    a.says("waiting for host b (attention-1, ffn-1)", 20, before)
    time.sleep(0.5)
    done = [len(stream.tokens) for stream in running]
    hosts.machines["b"].mend()
    assert tokens_when_whole(running, 90) == wanted
    assert min(done) < TOKENS, "all requests had ended before the cable was cut"
    a.says("every host is there again", 20, before)


def test_a_host_without_power_comes_back(hosts: TwoHosts, wanted: list[list[int]]) -> None:
    """Requests on the other host wait for the FFN instance, and no token of them is lost."""
    hosts.await_whole()
    running = streams()
    all_begun(running)
    hosts.runs["b"].kill()
    done = [len(stream.tokens) for stream in running]
    hosts.serve("b")
    left = [
        (s, tokens) for s, tokens in zip(running, wanted, strict=True) if s.instance[-1:] == "0"
    ]
    assert 0 < len(left) < len(running), "the gateway did not use both attention instances"
    for stream, tokens in left:
        assert (stream.join(120).error, stream.tokens) == (None, tokens)
    assert min(done) < TOKENS, "all requests had ended before the host was killed"
