"""The failures of a spec as windows of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afd.planner.simulate.result import FailureImpact
from afd.planner.simulate.spec import Spec
from afd.planner.simulate.tally import Tally


@dataclass(frozen=True)
class Window:
    """An instance of one pool is away in [begin, end), seconds."""

    instance: int
    begin: float
    end: float

    def impact(
        self, pool: str, tally: Tally, *, stalls_until: float, replayed: int = 0, tokens: int = 0
    ) -> FailureImpact:
        what = f"{pool}-{self.instance} away for {self.end - self.begin:g} s"
        stall = tally.stall(self.begin, stalls_until)
        return FailureImpact(what, self.begin, stall, replayed, tokens)


def ffn_windows(spec: Spec) -> list[Window]:
    """In order of their beginnings."""
    return _sorted(
        Window(f.ffn, f.at_s, f.at_s + f.back_after_s) for f in spec.failures if f.ffn is not None
    )


def attention_windows(spec: Spec) -> list[Window]:
    """In order of their beginnings."""
    return _sorted(
        Window(f.attention, f.at_s, f.at_s + f.back_after_s)
        for f in spec.failures
        if f.attention is not None
    )


def _sorted(windows: Iterable[Window]) -> list[Window]:
    return sorted(windows, key=lambda window: window.begin)


def outages(windows: Sequence[Window], moment: float) -> list[tuple[int, float, float]]:
    """(FFN instance, from, until) of the windows that are not over by ``moment``."""
    return [(w.instance, w.begin, w.end) for w in windows if w.end > moment]
