"""The timeline of a simulation as spans, and as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.result import TracedStep

Stage = Literal["attention", "a2f", "ffn", "f2a"]


@dataclass(frozen=True)
class Span:
    """One stage of one micro-batch in one layer on one instance. ``begin``, ``end``: seconds.

    The stages ``attention`` and ``ffn`` compute; in ``a2f`` and ``f2a`` the instance's link sends.
    """

    step: int
    stage: Stage
    instance: int
    layer: int
    micro_batch: int
    begin: float
    end: float


def spans(timeline: Sequence[TracedStep], *, instances: int = 4) -> Iterator[Span]:
    """Yields the spans of a timeline, for at most the first ``instances`` instances of each pool.

    Transfers that take no time are omitted.
    """
    for traced in timeline:
        s = traced.spans
        x = traced.instances[:instances]
        y = range(min(instances, s.ffn.shape[-1]))
        yield from _of(traced.number, "attention", s.attention, x)
        yield from _of(traced.number, "a2f", s.out, x)
        yield from _of(traced.number, "ffn", s.ffn, y)
        yield from _of(traced.number, "f2a", s.back, y)


def _of(step: int, stage: Stage, times: Array, instances: Sequence[int]) -> Iterator[Span]:
    _, layers, depth, _ = times.shape
    for place, instance in enumerate(instances):
        for layer in range(layers):
            for mb in range(depth):
                begin, end = times[:, layer, mb, place]
                if np.isfinite(begin) and end > begin:
                    yield Span(step, stage, instance, layer, mb, float(begin), float(end))


def chrome_trace(rows: Sequence[Span]) -> dict[str, object]:
    """Converts spans to the trace-event format ("X" events, microseconds).

    Each instance is a process with two threads: computing, and its sending link.
    """
    names = sorted({(row.stage in ("ffn", "f2a"), row.instance) for row in rows})
    pids = {name: pid for pid, name in enumerate(names, start=1)}
    events: list[dict[str, object]] = []
    for (is_ffn, instance), pid in pids.items():
        name = f"{'ffn' if is_ffn else 'attention'}-{instance}"
        events.append(_metadata("process_name", pid, 0, name))
        events.append(_metadata("thread_name", pid, 1, "compute"))
        events.append(_metadata("thread_name", pid, 2, "link, sending"))
    for row in rows:
        events.append(
            {
                "ph": "X",
                "name": f"L{row.layer} mb{row.micro_batch}",
                "cat": row.stage,
                "pid": pids[row.stage in ("ffn", "f2a"), row.instance],
                "tid": 1 if row.stage in ("attention", "ffn") else 2,
                "ts": 1e6 * row.begin,
                "dur": 1e6 * (row.end - row.begin),
                "args": {"step": row.step, "layer": row.layer, "micro_batch": row.micro_batch},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


def write_trace(path: Path, timeline: Sequence[TracedStep], *, instances: int = 4) -> int:
    """Writes a trace file and returns its number of spans."""
    rows = list(spans(timeline, instances=instances))
    path.write_text(json.dumps(chrome_trace(rows)) + "\n", encoding="utf-8")
    return len(rows)
