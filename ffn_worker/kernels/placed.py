"""What stands around grouped matrix products of another library, as Triton kernels.

Every pair (row, expert) has a slot: its place in memory that is ordered by expert, -1 where nobody
here computes it (:mod:`ffn_worker.moe.sorting`, ``place_pairs``). Rows go into their slots in FP8,
come out of the first product in bfloat16, go into the second in FP8 again, and their results are
summed. Slots that no pair has are neither read nor written. Scales are stored as the library's TMA
loads want them: one after the other along the slots.
"""

import triton
import triton.language as tl

from afd.wire.codecs_triton import fp8_block


@triton.jit
def gather_rows_kernel(
    x_ptr, x_scale_ptr, slots_ptr, a_ptr, a_scale_ptr, hidden, capacity,
    EACH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """a[slots[row * EACH + k]] = x[row] for every k, with the scales.

    x uint8 [rows, hidden], FP8 codes; x_scale float32 [rows, hidden / 128]. a uint8
    [capacity, hidden]; a_scale float32 [hidden / 128, capacity]. BLOCK: a power of two from hidden
    on. Grid (rows).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    group = tl.arange(0, BLOCK // 128)
    inside, in_scales = column < hidden, group < hidden // 128
    x = tl.load(x_ptr + row * hidden + column, mask=inside)
    scale = tl.load(x_scale_ptr + row * (hidden // 128) + group, mask=in_scales)
    for k in tl.static_range(EACH):
        slot = tl.load(slots_ptr + row * EACH + k).to(tl.int64)
        here = slot >= 0
        tl.store(a_ptr + slot * hidden + column, x, mask=inside & here)
        tl.store(a_scale_ptr + group * capacity + slot, scale, mask=in_scales & here)


@triton.jit
def silu_quantise_kernel(
    h_ptr, slots_ptr, a_ptr, a_scale_ptr, width, capacity,
    FP8_MAX: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """a[slot] = silu(h[slot, :width]) * h[slot, width:] in FP8, for the slot of each pair.

    h bfloat16 [capacity, 2 * width]. a FP8 [capacity, width]; a_scale float32
    [width / 128, capacity]. Grid (pairs, ceil(width / (128 * GROUPS))).
    """
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    if slot < 0:
        return
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = column < width
    gate = tl.load(h_ptr + slot * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h_ptr + slot * 2 * width + width + column, mask=inside, other=0.0).to(tl.float32)
    code, scale = fp8_block(gate / (1.0 + tl.exp(-gate)) * up, FP8_MAX)
    tl.store(a_ptr + slot * width + column, code.to(a_ptr.dtype.element_ty), mask=inside)
    tl.store(a_scale_ptr + group * capacity + slot, scale, mask=group < width // 128)


@triton.jit
def sum_slots_kernel(
    y_ptr, slots_ptr, weights_ptr, out_ptr, hidden,
    TOP_K: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = sum over k of weights[row, k] * y[slots[row * EACH + k]]; with SHARED plus the
    row's last slot with weight 1. EACH: TOP_K, with SHARED TOP_K + 1.

    y bfloat16 [capacity, hidden]; slots below 0 are left out. Adds in float32 in the order of k.
    Grid (rows, ceil(hidden / BLOCK)).
    """
    EACH: tl.constexpr = TOP_K + 1 if SHARED else TOP_K
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in tl.static_range(EACH):
        slot = tl.load(slots_ptr + row * EACH + k).to(tl.int64)
        here = slot >= 0
        y = tl.load(y_ptr + slot * hidden + column, mask=(column < hidden) & here, other=0.0)
        y = y.to(tl.float32)
        if k < TOP_K:
            # A pair that is left out may have any weight, NaN too.
            y *= tl.load(weights_ptr + row * TOP_K + k, mask=here, other=0.0)
        total += y
    tl.store(out_ptr + row * hidden + column, total.to(out_ptr.dtype.element_ty), column < hidden)
