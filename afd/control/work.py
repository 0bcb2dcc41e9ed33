"""What a role tells the control plane of its work, with every heartbeat."""

from __future__ import annotations

from afd.control.messages import BucketSteps, Work
from afd.metrics import RoleMetrics


def work_of(metrics: RoleMetrics) -> Work:
    """Totals since the start; from any thread."""
    return Work(
        metrics.own_stage_seconds,
        metrics.bubble_seconds,
        tuple(
            BucketSteps(rows, depth, timed.steps, timed.seconds)
            for (rows, depth), timed in metrics.decode_steps.totals().items()
        ),
    )
