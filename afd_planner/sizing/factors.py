"""Factors of measured kernels (:mod:`afd_planner.cost.kernels`) for many units at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from afd_planner.cost.interpolate import Array
from afd_planner.cost.kernels import (
    attention_fixed_s,
    core_factors,
    expert_factors,
    head_factors,
    projection_factors,
    table_of,
)
from afd_planner.facts.ffn import Ffn, MoeFfn
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import LayerGroup
from afd_planner.sizing.request import Request


def _measured(request: Request, accelerator: Accelerator) -> bool:
    return bool(request.efficiency.kernels) and table_of(accelerator.name) is not None


def attention_factors(
    request: Request, accelerator: Accelerator, group: LayerGroup, tp: Array, rows: Array
) -> Mapping[str, Array]:
    """Returns the factors of the parts of an attention stage, [n] each.

    Args:
        tp: [n] GPUs per data-parallel group, or one number. rows: [n] sequences of a group.
    """
    if not _measured(request, accelerator):
        return {}
    tokens = rows * request.positions
    around = projection_factors(accelerator.name, group, request.precision)
    core = core_factors(
        accelerator.name, group, request.precision, request.efficiency.equal_lengths
    )
    return {
        "projections": around.at(tp, tokens, 1.0),
        "attention": core.at(tp, tokens, request.context.mean),
    }


def held_fixed_s(
    request: Request, accelerator: Accelerator, group: LayerGroup, *, handed_over: bool
) -> float:
    """Returns the fixed seconds of an attention layer that the measured kernels hold."""
    without, with_kernels = (
        attention_fixed_s(
            group, accelerator, request.precision, efficiency, handed_over=handed_over
        )
        for efficiency in (request.roofline, request.efficiency)
    )
    return without - with_kernels


def expert_factor(
    request: Request, accelerator: Accelerator, ffn: Ffn, tp: Array, tokens: Array, groups: Array
) -> Array | float:
    """Returns the factor of an FFN stage [n].

    Args:
        tp: [n] GPUs per expert group. tokens: [n] of the whole pool. groups: [n] expert groups.
    """
    if not _measured(request, accelerator) or not isinstance(ffn, MoeFfn):
        return 1.0
    factors = expert_factors(accelerator.name, ffn, request.precision)
    return factors.at(tp, tokens * ffn.top_k / ffn.experts, ffn.experts / groups)


def head_factor(
    request: Request, accelerator: Accelerator, tp: Array, tokens: Array
) -> Array | float:
    """Returns the factor of LM head and sampling [n]; tokens: [n] of a data-parallel group."""
    if not _measured(request, accelerator):
        return 1.0
    model, out = request.model, np.ones_like(tokens)
    width = np.broadcast_to(tp, tokens.shape)
    for value in np.unique(width):
        factors = head_factors(
            accelerator.name, model.hidden, int(model.vocab / value), request.precision
        )
        here = width == value
        out[here] = factors.at(1.0, tokens[here], 1.0)
    return out
