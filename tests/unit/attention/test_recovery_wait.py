"""A wait that all FFN ranks have answered: nothing is looked for, with the same result."""

import itertools
from types import SimpleNamespace

import pytest

from afd_comm import Status
from attention_worker.remote.recovery import Recovery


class Sessions:
    """Sessions that are all alive; notes what recovery asks."""

    ranks = (0, 1, 2)

    def __init__(self):
        self.asked = []

    def note_unreachable(self, ranks):
        self.asked.append(set(ranks))

    def rejoined(self):
        return False

    def is_lost(self, _rank):
        return False


@pytest.mark.parametrize("statuses", [*itertools.product([Status.OK, Status.DEADLINE], repeat=3)])
@pytest.mark.parametrize("unsent", [set(), {1}])
def test_ranks_that_did_not_answer_are_waited_for(statuses, unsent):
    sessions = Sessions()
    outbox = SimpleNamespace(unsent=unsent, layer_of=lambda _mb: 0)
    recovery = Recovery(sessions, outbox, None, None, 60.0)  # type: ignore[arg-type]
    recovery.begin_wait()
    missing = recovery.recover_missing(0, [0, 1, 2], statuses)
    assert missing == [j for j, status in enumerate(statuses) if status != Status.OK]
    assert sessions.asked == ([unsent] if unsent or missing else [])
