"""The work totals that a role sends to the control plane with every heartbeat."""

from __future__ import annotations

from afd.control.messages import BucketSteps, Work
from afd.metrics.role import RoleMetrics


def work_of(metrics: RoleMetrics) -> Work:
    """Returns the totals since the role started. Any thread may call it."""
    return Work(
        metrics.own_stage_seconds,
        metrics.bubble_seconds,
        tuple(
            BucketSteps(rows, depth, timed.steps, timed.seconds)
            for (rows, depth), timed in metrics.decode_steps.totals().items()
        ),
    )
