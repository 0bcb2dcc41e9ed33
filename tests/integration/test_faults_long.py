"""Attention instances die under mixed load, again and again: ./run test tests/integration -m long

AFD_FAULTS is the number of repetitions of each case, AFD_TEST_SEED repeats the moments of a run.
"""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import pytest
from deployments import Host
from helpers import HEALTH_S, wait_until
from replies import Kind, Reply, ask_mixed, kinds, mixed, problems

from afd.control.messages import Member

pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = [pytest.mark.serve, pytest.mark.long]

Undisturbed: TypeAlias = tuple[list[tuple[Kind, dict[str, Any]]], list[Reply]]
REPEATS = int(os.environ.get("AFD_FAULTS", "3"))
SEED = os.environ.get("AFD_TEST_SEED", str(time.time_ns()))


def end(member: Member, victim: str) -> None:
    """Ends one part of an attention instance."""
    engine = member.pid
    server = os.getpgid(engine)  # the process that afd serve started
    pid, number = {
        "engine": (engine, signal.SIGKILL),
        "server": (server, signal.SIGKILL),
        "sigterm": (server, signal.SIGTERM),
    }[victim]
    os.kill(pid, number)


@pytest.fixture(scope="module", params=["2A1F", "1A1F"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def undisturbed(host: Host, name: str, terse: dict[str, float]) -> Undisturbed:
    requests = mixed(kinds(terse), 36, 60)
    replies = ask_mixed(host.serve(name).url, requests)
    assert not [reply.error for reply in replies if reply.error]
    return requests, replies


@pytest.mark.parametrize("victim", ["engine", "server", "sigterm"])
def test_nothing_is_lost(
    host: Host,
    name: str,
    undisturbed: Undisturbed,
    victim: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    deployment = host.serve(name)
    draw = random.Random(f"{SEED} {name} {victim}")
    requests, replies = undisturbed
    failed, wrong, back, last = 0, [], [], []
    place = max(m.id for m in deployment.members().members if m.role == "attention")
    for _ in range(REPEATS):
        before = deployment.member(place)
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask_mixed, deployment.url, requests)
            time.sleep(draw.uniform(0.1, 4.0))
            end(before, victim)
            began = time.monotonic()
            found = asking.result(240)
            last.append(round(time.monotonic() - began, 1))
        failed += sum(bool(reply.error) for reply in found)
        wrong += [
            words
            for (kind, _), one, other in zip(requests, replies, found, strict=True)
            for words in problems(kind, one, other)
        ]
        wait_until(partial(deployment.is_back, before), HEALTH_S, "the instance is back")
        back.append(round(time.monotonic() - began, 1))
    replays = deployment.total("afd_gateway_replays_total")
    line = {
        "case": f"{name} {victim}", "seed": SEED, "requests": REPEATS * len(requests),
        "failed": failed, "wrong": len(wrong) - failed, "back_s": back, "last_answer_s": last,
        "replays": replays,
    }  # fmt: skip
    with capsys.disabled():
        print(f"\n{json.dumps(line)}")
    assert not wrong, "\n".join(wrong)
