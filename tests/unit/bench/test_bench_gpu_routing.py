"""`afd bench gpu routing` and `lengths`: what they read of a server, and when they refuse."""

import asyncio
import contextlib

import pytest

from afd.errors import AfdError
from afd_bench.gpu import lengths, routing
from afd_bench.gpu.load import Load, Steady

LOAD = Load(2, 8, 100, 2000)


class Counting:
    """An FFN instance with two layers of three experts; each look adds rows to the first two."""

    def __init__(self) -> None:
        self.looks = 0

    def metrics(self) -> str:
        self.looks += 1
        rows = {(1, 0): 10 * self.looks, (1, 1): 5, (2, 0): 7, (2, 1): 7 + 3 * self.looks}
        lines = [
            f'afd_expert_rows_total{{layer="{layer}",expert="{expert}"}} {count}'
            for (layer, expert), count in rows.items()
        ]
        return "\n".join(["# TYPE afd_expert_rows counter", *lines, ""])


@pytest.fixture(autouse=True)
def held_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.asynccontextmanager
    async def held(server, load):
        yield

    monkeypatch.setattr(routing, "held", held)


def test_rows_of_the_window_are_counted() -> None:
    found = asyncio.run(routing.chosen(Counting(), LOAD, [1, 2], 3, 0.01))
    assert found == ((10, 0, 0), (0, 3, 0))


def test_a_layer_without_rows_is_an_error() -> None:
    with pytest.raises(AfdError, match="no row was counted in layer 3; raise --window"):
        asyncio.run(routing.chosen(Counting(), LOAD, [1, 3], 3, 0.01))


def test_step_times_are_medians_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, times = [], iter([0.1, 0.2, 0.3, 0.6, 0.2, 0.4])

    def steady(server, load, window_s):
        asked.append(load.mixed)
        return Steady(1.0, next(times), window_s, 0.0)

    monkeypatch.setattr(lengths, "steady", steady)
    assert lengths.step_times(None, LOAD, 3, 1.0) == (0.2, 0.4)
    assert asked == [False, True] * 3
