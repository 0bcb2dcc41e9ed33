"""The only attention instance, of one rank or two, dies under load: its requests wait, and it is
back within 15 s.

``AFD_TEST_SEED`` repeats a run. The time is that of a machine that does nothing else.
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from afd_bench.faults.command import VOCAB
from afd_bench.faults.faults import Fault
from afd_bench.faults.measure import config_of, inject
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Traffic, answered, jobs
from afd_bench.servers import disaggregated

pytest.importorskip("vllm", reason="the package vllm is not installed; ./run test installs it")
pytestmark = [pytest.mark.serve, pytest.mark.long]

SEED = int(os.environ.get("AFD_TEST_SEED") or time.time())
BACK_S = 15.0
WAITS_S = 120.0
"""Longest time until a process waits with its imports done, on a machine under load."""


def kill(subject: Subject, draw: random.Random) -> None:
    subject.signal_group("attention-0", signal.SIGKILL)


def kill_rank(subject: Subject, draw: random.Random) -> None:
    """The engine and the other rank end with it."""
    os.kill(subject.member_pid("attention-0.1"), signal.SIGKILL)


KILL = Fault("kill -9 attention API server and engine", kill, BACK_S, renews="attention")
KILL_RANK = Fault("kill -9 an attention rank", kill_rank, BACK_S, renews="attention")


@pytest.fixture
def lone(
    tiny_models: Callable[[str], Path], tmp_path: Path, tp: int
) -> Iterator[tuple[Subject, Traffic]]:
    config = config_of(tiny_models("qwen3_moe"))
    attention, ffn = config["attention"], config["ffn"]
    assert isinstance(attention, dict) and isinstance(ffn, dict)
    attention["instances"] = attention["max_instances"] = ffn["instances"] = 1
    attention["tp"] = tp
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(disaggregated(config, log=tmp_path / "serve.log"))
        subject = Subject(server)
        subject.await_whole(120)
        asked = jobs(SEED, 24, vocab=VOCAB, new_tokens=(30, 100))
        asked = answered(server.url, server.model, asked)
        traffic = Traffic(server.url, server.model, asked, clients=12, seed=SEED)
        yield subject, stack.enter_context(traffic)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("tp", [1, 2])
def test_the_only_attention_instance_is_back_within_15_s(
    lone: tuple[Subject, Traffic], tp: int
) -> None:
    subject, traffic = lone
    draw = random.Random(SEED)
    waits = subject.await_waiting_attention(WAITS_S)
    for fault in (KILL, KILL, KILL) if tp == 1 else (KILL, KILL_RANK, KILL):
        cell = inject(subject, traffic, fault, draw)
        text = f"AFD_TEST_SEED={SEED}; {cell.line}"
        print(text)
        command = subject.leaders()["attention-0"].cmdline()
        assert command == waits.cmdline()  # it is a fork of that process
        assert (cell.counts.failed, cell.counts.refused, cell.counts.wrong) == (0, 0, 0), text
        assert cell.recovery_s < BACK_S, text
