"""Triton kernels around the grouped matrix products of DeepGEMM: gather, SiLU, weighted sum.

Every pair (row, expert) has a slot: its index in memory ordered by expert, -1 if the expert is not
local (``place_pairs`` of :mod:`ffn_worker.moe.sorting`). Rows are copied to their slots in FP8 or
bfloat16. The first product returns bfloat16, the second takes the format of the first. The results
are summed per row, plus those of a shared expert, which reads rows in their original order. Slots
without a pair are neither read nor written. Scales are stored for the library's TMA loads: those of
neighbouring slots are contiguous.
"""

import triton
import triton.language as tl

from afd.wire.codecs_triton import fp8_block


@triton.jit
def gather_rows_kernel(
    x_ptr, x_scale_ptr, slots_ptr, a_ptr, a_scale_ptr, hidden, capacity,
    EACH: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a[slots[row * EACH + k]] = x[row] for every k; with SCALED, also the scales.

    x [rows, hidden] and a [capacity, hidden]: FP8 codes or bfloat16. x_scale float32
    [rows, hidden / 128]; a_scale float32 [hidden / 128, capacity]. BLOCK: hidden rounded up to a
    power of two. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < hidden
    x = tl.load(x_ptr + row * hidden + column, mask=inside)
    if SCALED:
        group = tl.arange(0, BLOCK // 128)
        in_scales = group < hidden // 128
        scale = tl.load(x_scale_ptr + row * (hidden // 128) + group, mask=in_scales)
    for k in tl.static_range(EACH):
        slot = tl.load(slots_ptr + row * EACH + k).to(tl.int64)
        here = slot >= 0
        tl.store(a_ptr + slot * hidden + column, x, mask=inside & here)
        if SCALED:
            tl.store(a_scale_ptr + group * capacity + slot, scale, mask=in_scales & here)


@triton.jit
def silu_kernel(
    h_ptr, slots_ptr, a_ptr, a_scale_ptr, pairs, width, capacity,
    PLACED: tl.constexpr, FP8_MAX: tl.constexpr, PAIRS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """a[slot] = silu(h[slot, :width]) * h[slot, width:] for the slot of each pair.

    Without PLACED, for the first ``pairs`` rows of h.

    h bfloat16 [capacity, 2 * width]. a [capacity, width] FP8 with a_scale float32
    [width / 128, capacity]; FP8_MAX 0: bfloat16. Grid (ceil(pairs or rows / PAIRS),
    ceil(width / (128 * GROUPS))).
    """
    each = tl.arange(0, PAIRS * GROUPS)
    pair = tl.program_id(0) * PAIRS + each // GROUPS
    slot = tl.where(pair < pairs, pair, -1)
    if PLACED:
        slot = tl.load(slots_ptr + pair, mask=pair < pairs, other=-1)
        if tl.max(slot, axis=0) < 0:
            return
    group = tl.program_id(1) * GROUPS + each % GROUPS
    here = (slot >= 0) & (group < width // 128)
    slot = slot.to(tl.int64)
    inside = here[:, None]
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    at = h_ptr + slot[:, None] * 2 * width + column
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    if FP8_MAX > 0:
        value, scale = fp8_block(value, FP8_MAX, EXACT=False)
        tl.store(a_scale_ptr + group * capacity + slot, scale, mask=here)
    value = value.to(a_ptr.dtype.element_ty)
    tl.store(a_ptr + slot[:, None] * width + column, value, mask=inside)


@triton.jit
def sum_slots_kernel(
    y_ptr, slots_ptr, weights_ptr, shared_ptr, out_ptr, hidden,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over k of weights[row, k] * y[slots[row * TOP_K + k]].

    With SHARED, adds shared[row]. y bfloat16 [capacity, hidden], shared [rows, hidden]; slots below
    0 are skipped. Adds in
    float32 in the order of k. Grid (rows, ceil(hidden / BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    if SHARED:
        at = shared_ptr + row * hidden + column
        total += tl.load(at, mask=column < hidden, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        slot = tl.load(slots_ptr + row * TOP_K + k).to(tl.int64)
        here = slot >= 0
        y = tl.load(y_ptr + slot * hidden + column, mask=(column < hidden) & here, other=0.0)
        # A skipped pair may have any weight, even NaN.
        total += y.to(tl.float32) * tl.load(weights_ptr + row * TOP_K + k, mask=here, other=0.0)
    tl.store(out_ptr + row * hidden + column, total.to(out_ptr.dtype.element_ty), column < hidden)
