"""Every fault under load, three times at random moments: no request fails, no token is wrong.

``AFD_TEST_SEED`` repeats a run. tests/integration/test_faults.py is the part that CI has time for.
"""

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from afd_bench.faults.command import VOCAB
from afd_bench.faults.faults import FAULTS
from afd_bench.faults.measure import Cell, config_of, inject
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Traffic, answered, jobs
from afd_bench.servers import disaggregated

pytest.importorskip("vllm", reason="the package vllm is not installed; ./run test installs it")
pytestmark = [pytest.mark.serve, pytest.mark.long]

SEED = int(os.environ.get("AFD_TEST_SEED") or time.time())
CLIENTS = 12
PAUSE_S = 30.0
"""Longest pause of a stream that is no failure here: this machine is shared."""


@dataclass(frozen=True)
class Bench:
    subject: Subject
    traffic: Traffic
    draw: random.Random

    def inject(self, name: str) -> Cell:
        cell = inject(self.subject, self.traffic, FAULTS[name], self.draw)
        print(f"AFD_TEST_SEED={SEED}; {cell.line}")
        return cell


@pytest.fixture(scope="module")
def bench(
    tiny_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bench]:
    log = tmp_path_factory.mktemp("faults") / "serve.log"
    with contextlib.ExitStack() as stack:
        config = config_of(tiny_models("qwen3_moe"))
        server = stack.enter_context(disaggregated(config, log=log))
        subject = Subject(server)
        subject.await_whole(120)
        asked = jobs(SEED, 24, vocab=VOCAB, new_tokens=(30, 100))
        asked = answered(server.url, server.model, asked)
        traffic = stack.enter_context(
            Traffic(server.url, server.model, asked, clients=CLIENTS, seed=SEED, comes_back=True)
        )
        yield Bench(subject, traffic, random.Random(SEED))


def nothing_lost(cell: Cell) -> None:
    assert cell.counts.done > 0, "the clients got no answer at all"
    assert (cell.counts.failed, cell.counts.refused, cell.counts.wrong) == (0, 0, 0), cell.line
    assert cell.counts.longest_s < PAUSE_S, cell.line


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", list(FAULTS))
def test_every_fault(bench: Bench, name: str) -> None:
    for _ in range(3):
        nothing_lost(bench.inject(name))
