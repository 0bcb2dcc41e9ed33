"""Faults under load, at random moments, in 2A2F: no request fails, no token is wrong.

``AFD_TEST_SEED`` repeats a run. ``./run test -m long tests/faults`` injects all faults.
"""

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from deployments import Host
from helpers import VOCAB

from afd_bench.faults.faults import FAULTS
from afd_bench.faults.measure import inject
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Job, Traffic, answered, jobs

pytestmark = pytest.mark.serve

SEED = int(os.environ.get("AFD_TEST_SEED") or time.time())
CLIENTS = 8
PAUSE_S = 30.0
"""Longest pause of a stream that is no failure here: this machine is shared."""


@dataclass(frozen=True)
class Faults:
    subject: Subject
    traffic: Traffic
    draw: random.Random

    def generations(self, role: str) -> list[int]:
        """Of the two instances of a role; a new process has a new one."""
        return [self.subject.generation(f"{role}-{i}") for i in range(2)]

    def inject(self, name: str) -> None:
        """Injects a fault; fails the test if a request was lost or a token was wrong."""
        cell = inject(self.subject, self.traffic, FAULTS[name], self.draw)
        text = f"AFD_TEST_SEED={SEED}; {cell.line}"
        print(text)
        counts = cell.counts
        assert counts.done > 0, "the clients got no answer at all"
        assert (counts.failed, counts.refused, counts.wrong) == (0, 0, 0), text
        assert counts.longest_s < PAUSE_S, text


_asked: dict[str, tuple[Job, ...]] = {}


@pytest.fixture
def faults(host: Host) -> Iterator[Faults]:
    server = host.serve("pair").server
    if server.url not in _asked:
        asked = jobs(SEED, 16, vocab=VOCAB, new_tokens=(30, 100))
        _asked[server.url] = answered(server.url, server.model, asked)
    asked = _asked[server.url]
    with Traffic(server.url, server.model, asked, clients=CLIENTS, seed=SEED) as traffic:
        yield Faults(Subject(server), traffic, random.Random(SEED))


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.long)])
def test_killed_ffn_instances(faults: Faults, kills: int) -> None:
    for _ in range(kills):
        before = faults.generations("ffn")
        faults.inject("kill -9 FFN")
        assert faults.generations("ffn") != before


@pytest.mark.long
def test_an_ffn_instance_that_is_killed_again_while_it_starts(faults: Faults) -> None:
    faults.inject("kill -9 FFN while it starts")


def test_a_stopped_ffn_instance_is_replaced(faults: Faults) -> None:
    before = faults.generations("ffn")
    faults.inject("SIGSTOP FFN 15 s")
    assert faults.generations("ffn") != before
    assert "is stalled: its process lives" in faults.subject.server.log.read_text()
