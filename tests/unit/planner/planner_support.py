"""Planner requests, shared by several tests."""

import time
from collections.abc import Callable
from dataclasses import replace

from afd_planner.cost.shape import calibrated
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.sizing.context import fixed
from afd_planner.sizing.request import Request


def request(model="step-3", accelerator="h800", ffn=None, context=4096, **changes) -> Request:
    first = load_accelerator(accelerator)
    second = load_accelerator(ffn) if ffn else first
    changes.setdefault("efficiency", calibrated((first, second)))
    return Request(load_model(model), (first,), (second,), fixed(context), **changes)


INSTANT = replace(calibrated((load_accelerator("h200"),)), handover_s=0, turn_s=0, kernels=False)
"""H200 without the two costs of handing over under AFD. Then some plans win for certain."""


def scaled(asked: Request, field: str, factor: float) -> Request:
    """Returns the request with ``field`` of every accelerator multiplied by ``factor``."""

    def better(gpu):
        return replace(gpu, **{field: getattr(gpu, field) * factor})

    return replace(
        asked,
        attention=tuple(better(gpu) for gpu in asked.attention),
        ffn=tuple(better(gpu) for gpu in asked.ffn),
    )


def is_quick(work: Callable[[], object]) -> bool:
    """Returns whether ``work`` takes at most as long as Python needs to count to 300 million: 6 s
    on a quick processor, 15 s on a slow one, with a Python built with profile-guided optimisation.

    The best of three turns counts, because other load can only slow a turn.
    """

    def seconds(turn: Callable[[], object]) -> float:
        began = time.process_time()
        turn()
        return time.process_time() - began

    def count() -> None:
        number = 0
        while number < 2_000_000:
            number += 1

    return any(seconds(work) <= 150 * seconds(count) for _ in range(3))
