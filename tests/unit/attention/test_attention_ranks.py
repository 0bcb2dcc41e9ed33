"""The ranks of an attention instance share its rows; here they are threads, without vLLM.

Every rank compares its gathered answers with the reference experts, on all rows.
"""

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from remote_support import Deployed, in_background, reference_model, run_step

from attention_worker.ranks import Ranks, cores_of_rank, rows_per_rank

BOUND_S = 60.0


class Group:
    """Stands in for torch's process group: each rank calls it from a thread of its own."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._given: list[torch.Tensor | int] = [0] * count
        self._barrier = threading.Barrier(count)

    def ranks(self, rank: int) -> Ranks:
        def exchanged(value):
            self._given[rank] = value
            self._barrier.wait(BOUND_S)
            found = list(self._given)
            self._barrier.wait(BOUND_S)
            return found

        return Ranks(
            rank,
            self.count,
            gather=lambda rows: torch.cat(exchanged(rows)),
            agree=lambda value: exchanged(value)[0],
        )


class Instances:
    """A deployment whose attention instances have several ranks."""

    def __init__(self, checkpoint, x: int, y: int, tp: int, **sections) -> None:
        # A rank that waits for its sibling in vain would be so late.
        ffn = {"late_ms": 10000.0, **sections.pop("ffn", {})}
        self.deployed = Deployed(checkpoint, x, y, attention={"tp": tp}, ffn=ffn, **sections)
        self.expected = reference_model(checkpoint)
        groups = [Group(tp) for _ in range(x)]
        self.tp, self.experts = tp, []
        for number, client in enumerate(self.deployed.clients):
            index, rank = divmod(number, tp)
            self.experts.append(groups[index].ranks(rank).experts(client))

    @property
    def late(self) -> int:
        return sum(loop.rank.metrics.late_peers for loop in self.deployed.loops.values())

    def run(
        self,
        steps,
        pause=lambda number, step: 0.0,
        between=lambda number: 0.0,
        meanwhile=lambda: None,
    ) -> None:
        """Runs steps on all ranks; ``steps(instance)`` yields the rows per micro-batch.

        pause, between: seconds before a step, and after each request, of a rank by number.
        """

        def work(number: int) -> None:
            for step, sizes in enumerate(steps(number // self.tp)):
                time.sleep(pause(number, step))
                experts, index = self.experts[number], number // self.tp
                facts, seed, wait_s = self.deployed.resolved, (index, step), between(number)
                run_step(experts, facts, self.expected, sizes, seed, wait_s)
            self.deployed.clients[number].leave()

        running = [in_background(work, number) for number in range(len(self.experts))]
        for thread, _ in running:
            thread.start()
        meanwhile()
        for thread, _ in running:
            thread.join(BOUND_S)
        assert not [failure for _, failure in running if failure]
        assert not any(thread.is_alive() for thread, _ in running)


@pytest.fixture
def instances(tiny_models):
    running = []

    def make(x, y, tp, **sections):
        running.append(Instances(tiny_models("deepseek_v3"), x, y, tp, **sections))
        return running[-1]

    yield make
    for made in running:
        made.deployed.close()


@pytest.mark.parametrize(
    "x,y,tp,sections",
    [
        (1, 1, 2, {}),
        (2, 1, 2, {"ffn": {"tp": 2}}),
        (1, 2, 3, {"wire": {"dispatch": "routed"}}),
    ],
)
def test_every_rank_has_all_answers(instances, x, y, tp, sections):
    made = instances(x, y, tp, **sections)
    made.run(lambda i: [[1 + (i + s + mb) % 7 for mb in range(1 + (s + i) % 3)] for s in range(4)])
    assert made.late == 0
    sent = [loop.rank.metrics.rows_per_ffn_call.snapshot() for loop in made.deployed.loops.values()]
    assert all(rows.count > 0 for rows in sent)


def test_a_request_of_the_next_step_waits_for_its_sibling(instances):
    """An instance with one micro-batch begins its next step before the other one has ended."""
    made = instances(2, 1, 2)
    made.run(
        lambda i: [[2, 2, 2] if i else [2]] * 3,
        pause=lambda number, _: 0.15 * (number == 1),
        between=lambda number: 0.02 * (number >= 2),
    )
    assert made.late == 0


def test_a_rank_that_begins_late_is_waited_for(instances):
    made = instances(1, 1, 2)
    made.run(lambda _: [[3, 4], [5]], pause=lambda number, step: 0.1 * ((number + step) % 2))
    assert made.late == 0


@pytest.mark.parametrize("y", [1, pytest.param(2, marks=pytest.mark.long)])
def test_an_ffn_restart_in_mid_step_loses_nothing(instances, y):
    made = instances(1, y, 2)

    def restart():
        time.sleep(0.15)
        made.deployed.stop_ffn(y - 1)
        made.deployed.start_ffn(y - 1)

    made.run(lambda _: [[2, 3, 1]] * 12, pause=lambda *_: 0.02, meanwhile=restart)
    retries = [c._observer.metrics.ffn_retries["lost"] for c in made.deployed.clients]
    assert retries == [1, 1]


@given(rows=st.integers(1, 64), ranks=st.integers(1, 8))
def test_shares_are_in_order_and_hold_every_row(rows, ranks):
    each = rows_per_rank(rows, ranks)
    shares = [range(min(r * each, rows), min((r + 1) * each, rows)) for r in range(ranks)]
    assert [row for share in shares for row in share] == list(range(rows))
    assert max(map(len, shares)) == each == -(-rows // ranks)


@given(cores=st.integers(0, 16), ranks=st.integers(1, 8))
def test_cores_are_divided_or_shared(cores, ranks):
    lists = [cores_of_rank(range(cores), rank, ranks) for rank in range(ranks)]
    assert set().union(*lists) == set(range(cores)) if cores >= ranks else True
    assert all(len(found) == 1 for found in lists) if 0 < cores < ranks else True
    if cores >= ranks:
        assert sum(map(len, lists)) == cores and min(map(len, lists)) >= 1
