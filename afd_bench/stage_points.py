"""Points of a file of measured stage times, from what `afd bench stages` observed. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from afd_bench.message_times import Samples, Times

_TOGETHER = 1.1


@dataclass(frozen=True)
class Decode:
    """Stage times of one decode window. context: KV-cache tokens per request at mid-window."""

    context: float
    times: Times


@dataclass(frozen=True)
class Observed:
    """Stage times of one pass over a plan.

    decodes: one list per context length, with one window per batch size. prefills: one per number
    of prompt rows.
    """

    decodes: list[list[Decode]]
    prefills: list[Times]


def points(observed: Sequence[Observed]) -> dict[str, list[dict[str, float]]]:
    """Returns the points of every stage from one or several passes over the same plan."""
    attention = []
    for lines in zip(*(one.decodes for one in observed), strict=True):
        line = [decode for some in lines for decode in some]
        # The mean context differs by some tokens between batches; a line of the table has one.
        context = round(statistics.mean(decode.context for decode in line))
        for point in _points([decode.times.attention for decode in line], "rows"):
            attention.append({"rows": point["rows"], "context": context, "us": point["us"]})
    decodes = [decode.times for one in observed for line in one.decodes for decode in line]
    prefills = [times for one in observed for times in one.prefills]
    ffn = _points([times.ffn for times in decodes], "rows")
    # Prefill calls with as few rows overlap with other work on the attention side, so decode times
    # take precedence.
    most = max((point["rows"] for point in ffn), default=0.0)
    prompts = _points([times.ffn for times in prefills], "rows", together=_TOGETHER)
    return {
        "attention": attention,
        "prefill": _points([times.attention for times in prefills], "rows", together=_TOGETHER),
        "ffn": ffn + [point for point in prompts if point["rows"] > most],
        "wire": _points([times.wire for times in decodes], "bytes", together=_TOGETHER),
        "rest": _points([times.rest for times in decodes], "rows"),
    }


def _points(
    windows: Sequence[Samples], what: str, *, together: float = 1.0
) -> list[dict[str, float]]:
    """Returns a point per number of rows (or bytes): the median over windows of each window's mean.

    together: amounts within this factor share a point. Prompt rows differ slightly between rounds,
    and message sizes differ slightly between the two directions.
    """
    groups: list[list[int]] = []
    for amount in sorted({amount for window in windows for amount in window}):
        if not groups or amount > groups[-1][0] * together:
            groups.append([])
        groups[-1].append(amount)
    out = []
    for group in groups:
        pairs = [
            [(amount, value) for amount in group for value in window.get(amount, ())]
            for window in windows
        ]
        means = [statistics.mean(value for _, value in some) for some in pairs if some]
        middle = statistics.mean(amount for some in pairs for amount, _ in some)
        time_us = max(0.01, statistics.median(means))
        out.append({what: round(middle, 1), "us": round(time_us, 2)})
    return out
