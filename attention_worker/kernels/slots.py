"""Maps expert ids to expert slots in one launch.

:class:`attention_worker.remote.expert_slots.ExpertSlotMap` launches the kernel and holds its
reference.
"""

import triton
import triton.language as tl


@triton.jit
def expert_slots_kernel(
    ids_ptr, slots_ptr, count_ptr, out_ptr, pairs, experts, first,
    TOP_K: tl.constexpr, COPIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes one slot per (row, expert) pair to out, int32 [rows, TOP_K].

    If an expert has several copies, the row number plus ``first`` selects one.

    ids: int32 [rows, TOP_K]; -1 (no expert) reads entry ``experts`` of both tables.
    slots: int32 [experts + 1, COPIES]. count: int32 [experts + 1]; not read if COPIES is 1.
    pairs: rows * TOP_K. Grid (ceil(pairs / BLOCK)).
    """
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=0)
    expert = tl.where(expert < 0, experts, expert)
    at = expert * COPIES
    if COPIES > 1:
        at += (pair // TOP_K + first) % tl.load(count_ptr + expert, mask=inside, other=1)
    tl.store(out_ptr + pair, tl.load(slots_ptr + at, mask=inside), mask=inside)
