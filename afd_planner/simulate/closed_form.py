"""Closed formula for the step time of a balanced deployment; tests compare the simulator with it.

Balanced means: equal instances per pool, equal layers and micro-batches, no jitter, no failures.
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
    """Returns the seconds from the first attention to the last answer of a step.

    In steady state, a layer takes depth times the slowest stage, or the round trip of one
    micro-batch if that is longer. The last layer drains the pipeline.

    Args:
        attention, ffn: Seconds of one layer for one micro-batch.
        out, back: Seconds that a transfer occupies the busiest link, over all instances.
        latency: Seconds of latency of each transfer; it occupies no link.
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
    """Returns the share of the step in which the slowest stage is busy, 0 to 1."""
    slowest = max(attention, out, ffn, back)
    step = step_seconds(layers, depth, attention, out, ffn, back, latency)
    return layers * depth * slowest / step if step else 0.0
