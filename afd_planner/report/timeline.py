"""The timeline of a few layers of the planned pipeline, computed by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afd_planner.cost.stages import AfdStages, layer_period
from afd_planner.simulate.step import StepInput, run_step

LANES = ("attention", "to FFN", "FFN", "to attention")


@dataclass(frozen=True)
class Span:
    """One stage of one micro-batch. ``begin``, ``end``: seconds since the step began."""

    lane: str
    layer: int
    micro_batch: int
    begin: float
    end: float


def timeline(stages: AfdStages, depth: int, layers: int = 4) -> tuple[Span, ...]:
    """Returns the spans of ``layers`` layers of the slowest layer group, without jitter.

    The result is empty if no layer has its FFN in the FFN pool.
    """
    remote = [group for group in stages.groups if group.ffn is not None]
    if not remote:
        return ()
    kind = max(remote, key=lambda g: len(g.layers) * layer_period(g, depth))
    assert kind.ffn is not None
    attention, ffn = kind.attention.seconds, kind.ffn.seconds
    turns = (kind.turn_s, 0.0) if attention > ffn else (0.0, kind.turn_s)  # of the busier pool
    shape = (layers, depth, 1)
    nothing = np.zeros((depth, 1))
    given = StepInput(
        start=np.zeros(1),
        rows=np.ones((depth, 1)),
        attention=np.full(shape, attention + turns[0]),
        ffn=np.full(shape, ffn + turns[1]),
        out_burst=np.full(shape, kind.to_ffn),
        out_each=nothing,
        back_burst=np.full(shape, kind.to_attention),
        back_each=nothing,
        out_latency=np.zeros(shape),
        back_latency=np.zeros(shape),
    )
    spans = run_step(given, spans=True).spans
    assert spans is not None
    tables = (spans.attention, spans.out, spans.ffn, spans.back)
    return tuple(
        Span(lane, layer, mb, float(table[0, layer, mb, 0]), float(table[1, layer, mb, 0]))
        for lane, table in zip(LANES, tables, strict=True)
        for layer in range(layers)
        for mb in range(depth)
    )


def busy(spans: tuple[Span, ...], lane: str) -> float:
    """Returns the share of time in which a lane is busy, between its first begin and last end."""
    own = [span for span in spans if span.lane == lane]
    whole = max(span.end for span in own) - min(span.begin for span in own)
    return sum(span.end - span.begin for span in own) / whole if whole else 0.0
