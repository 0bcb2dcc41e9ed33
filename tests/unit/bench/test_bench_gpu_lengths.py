"""`afd bench gpu lengths`: how its times are taken."""

import pytest

from afd_bench.gpu import lengths
from afd_bench.gpu.load import Load, Steady

LOAD = Load(2, 8, 100, 2000)


def test_step_times_are_medians_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, times = [], iter([0.1, 0.2, 0.3, 0.6, 0.2, 0.4])

    def steady(server, load, window_s):
        asked.append(load.mixed)
        return Steady(1.0, next(times), window_s, 0.0)

    monkeypatch.setattr(lengths, "steady", steady)
    assert lengths.step_times(None, LOAD, 3, 1.0) == (0.2, 0.4)
    assert asked == [False, True] * 3
