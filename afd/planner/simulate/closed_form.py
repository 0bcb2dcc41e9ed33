"""The step time of a balanced deployment as a formula: what the simulator must agree with.

Balanced: all instances of a pool alike, every layer and micro-batch alike, no jitter, no failure.
"""

from __future__ import annotations


def step_seconds(
    layers: int,
    depth: int,
    attention: float,
    out: float,
    ffn: float,
    back: float,
    latency: float = 0.0,
) -> float:
    """Time from the first micro-batch's attention to the last one's last answer.

    attention, ffn: seconds of one layer for one micro-batch. out, back: seconds that its transfer
    holds the busiest link, all instances together. latency: of each transfer, holds nothing.
    In the steady state a layer takes depth times the slowest stage, or one micro-batch's trip
    through all stages where that is longer; the last layer drains the pipeline.
    """
    trip = attention + out + ffn + back + 2 * latency
    slowest = max(attention, out, ffn, back)
    return (layers - 1) * max(depth * slowest, trip) + trip + (depth - 1) * slowest


def efficiency(
    layers: int,
    depth: int,
    attention: float,
    out: float,
    ffn: float,
    back: float,
    latency: float = 0.0,
) -> float:
    """Share of the step in which the slowest stage is busy, 0 to 1."""
    slowest = max(attention, out, ffn, back)
    step = step_seconds(layers, depth, attention, out, ffn, back, latency)
    return layers * depth * slowest / step if step else 0.0
