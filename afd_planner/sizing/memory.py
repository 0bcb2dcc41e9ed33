"""How many sequences an xAyF unit holds, counted as `afd serve --check` counts memory.

Each GPU holds weights, and a slot of the transport per peer and micro-batch; on an attention GPU,
the KV cache takes the rest. A slot has room for the tokens of a whole step, so a larger batch also
needs larger slots, on both sides (:mod:`afd_planner.cost.served`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from afd.wire.layout import layouts
from afd_planner.cost.interpolate import Array
from afd_planner.cost.served import SERVED_ATTENTION, STEP_TOKENS, TOKENS_PER_BLOCK, USABLE
from afd_planner.sizing.pools import AttentionPools, FfnPools
from afd_planner.sizing.request import Request

CACHE_STEP = 0.1 * 2**30
"""Bytes to which a deployment file rounds its cache down."""


@dataclass(frozen=True)
class Ranks:
    """Processes of the units, arrays [n].

    Attributes:
        attention, ffn: GPUs of each pool.
        depth: Micro-batches in flight.
        ffn_weights: Bytes of weights on the fullest FFN GPU.
        copied: Whether links send from buffers of their own, as between servers.
    """

    attention: Array
    ffn: Array
    depth: Array
    ffn_weights: Array
    copied: bool


def sequence_bytes(request: Request) -> float:
    """Returns the mean bytes of KV cache of one sequence."""
    return request.context.average(
        lambda tokens: request.model.kv_stored_bytes(tokens, request.precision.kv)
    )


def sequences_beside_weights(request: Request, attention: AttentionPools) -> float:
    """Returns the sequences that one attention GPU holds if nothing but weights is beside them."""
    usable = request.efficiency.memory_use * attention.accelerator.memory_bytes
    free = usable - attention.weights
    longest = request.model.kv_stored_bytes(request.context.longest, request.precision.kv)
    return free // sequence_bytes(request) if free >= longest else 0.0


def sequences_that_fit(
    request: Request,
    attention: AttentionPools,
    ffn: FfnPools,
    wire: str,
    ranks: Ranks,
    most: float,
) -> Array:
    """Returns the sequences [n] that one attention GPU holds, at most ``most``.

    The result is 0 if the longest request does not fit, or the FFN GPUs cannot hold their slots.
    """
    share = min(USABLE, request.efficiency.memory_use)
    free_a = share * attention.accelerator.memory_bytes - attention.weights - CACHE_STEP
    free_f = share * ffn.accelerator.memory_bytes - ranks.ffn_weights
    each = sequence_bytes(request)
    longest = request.model.kv_stored_bytes(request.context.longest, request.precision.kv)
    top_k = max(group.ffn.top_k for group in request.model.groups)
    best: Array = np.zeros_like(ranks.attention)
    tokens = STEP_TOKENS
    drafted = request.positions
    while tokens < most * drafted + TOKENS_PER_BLOCK:
        slots = layouts(wire, SERVED_ATTENTION, tokens, request.model.hidden, top_k)
        out, back = (slot.nbytes for slot in slots)
        control = ranks.depth + 1  # slots of an attention instance in an FFN rank's region
        used_a = ranks.ffn * (ranks.depth * back + ranks.copied * control * out)
        used_f = ranks.attention * (control * out + ranks.copied * ranks.depth * back)
        room = free_a - used_a
        fits = (used_f <= free_f) & (room >= longest)
        held = np.where(fits, np.minimum(np.floor(room / each), tokens // drafted), 0.0)
        best = np.maximum(best, held)
        if np.all(held < tokens // drafted):
            break  # larger slots leave less room for the cache
        tokens += TOKENS_PER_BLOCK
    return np.minimum(best, most)
