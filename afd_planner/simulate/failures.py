"""The failures of a spec as time windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from afd_planner.simulate.result import FailureImpact
from afd_planner.simulate.spec import Spec
from afd_planner.simulate.tally import Tally


@dataclass(frozen=True)
class Window:
    """An instance of one pool is down in [begin, end), seconds; for good if ``end`` is inf."""

    instance: int
    begin: float
    end: float

    def impact(
        self, pool: str, tally: Tally, *, stalls_until: float, replayed: int = 0, tokens: int = 0
    ) -> FailureImpact:
        """Returns the effect of the failure on steps between ``begin`` and ``stalls_until``."""
        lasts = f"for {self.end - self.begin:g} s" if math.isfinite(self.end) else "for good"
        what = f"{pool}-{self.instance} down {lasts}"
        stall = tally.stall(self.begin, stalls_until)
        return FailureImpact(what, self.begin, stall, replayed, tokens)


def ffn_windows(spec: Spec) -> list[Window]:
    """Returns the failures of FFN instances, sorted by begin."""
    return _sorted(Window(f.ffn, f.at_s, f.back_at_s) for f in spec.failures if f.ffn is not None)


def attention_windows(spec: Spec) -> list[Window]:
    """Returns the failures of attention instances, sorted by begin."""
    return _sorted(
        Window(f.attention, f.at_s, f.back_at_s) for f in spec.failures if f.attention is not None
    )


def _sorted(windows: Iterable[Window]) -> list[Window]:
    return sorted(windows, key=lambda window: window.begin)


def outages(windows: Sequence[Window], moment: float) -> list[tuple[int, float, float]]:
    """Returns (FFN instance, from, until) of the windows that end after ``moment``."""
    return [(w.instance, w.begin, w.end) for w in windows if w.end > moment]
