"""Routed dispatch on a GPU: the places of rows in the messages, and the messages themselves.

:mod:`attention_worker.remote.stream_dispatch` launches the kernels and holds their references.
"""

import triton
import triton.language as tl


def power_above(n: int) -> int:
    """Returns the smallest power of two that is not below ``n``."""
    return 1 << (n - 1).bit_length()


@triton.jit
def places_kernel(
    slots_ptr, bounds_ptr, rows_ptr, of_rows_ptr, counts_ptr, sent_ptr, rows, bank,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds the rows of one FFN instance per program, in ascending order.

    slots: int32 [rows, TOP_K], expert slots of both banks of ``bank`` slots each; negative: none.
    bounds: int32 [instances + 1]. rows_ptr, of_rows: int32 [instances, rows]. counts: int32
    [instances]; they are added to sent, int32 [instances]. See
    attention_worker.remote.stream_dispatch.Places. Grid (instances).
    """
    instance = tl.program_id(0)
    low = tl.load(bounds_ptr + instance)
    high = tl.load(bounds_ptr + instance + 1)
    found = tl.zeros((), tl.int32)
    for begin in range(0, rows, BLOCK):
        row = begin + tl.arange(0, BLOCK)
        inside = row < rows
        gets = tl.zeros((BLOCK,), tl.int32)
        for k in tl.static_range(TOP_K):
            slot = tl.load(slots_ptr + row * TOP_K + k, mask=inside, other=-1)
            place = tl.where(slot >= bank, slot - bank, slot)
            gets |= ((place >= low) & (place < high)).to(tl.int32)
        place = found + tl.cumsum(gets, 0) - 1
        tl.store(of_rows_ptr + instance * rows + row, tl.where(gets > 0, place, -1), mask=inside)
        tl.store(rows_ptr + instance * rows + place, row, mask=inside & (gets > 0))
        found += tl.sum(gets, 0)
    tl.store(counts_ptr + instance, found)
    tl.store(sent_ptr + instance, tl.load(sent_ptr + instance) + found)
    for begin in range(0, rows, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        beyond = (place >= found) & (place < rows)
        tl.store(rows_ptr + instance * rows + place, tl.zeros((BLOCK,), tl.int32), mask=beyond)


@triton.jit
def gather_rows_kernel(
    payload_ptr, scales_ptr, ids_ptr, weights_ptr, rows_ptr, counts_ptr,
    to_payload_ptr, to_scales_ptr, to_ids_ptr, to_weights_ptr, row_bytes, scale_bytes,
    TOP_K: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies one row per program to its place in an instance's message.

    From the instance's count on, ids become -1 and nothing else is written. payload uint8
    [rows, row_bytes]; scales uint8 [rows, scale_bytes] (SCALE_BLOCK 0: none); ids int32 and weights
    float32 [rows, TOP_K]; rows_ptr int32 [instances, rows]; counts int32 [instances]. Outputs
    [instances, rows, ...]. KINDS, BLOCK, SCALE_BLOCK: TOP_K, row_bytes and scale_bytes rounded up
    to powers of two. Grid (rows, instances).
    """
    instance = tl.program_id(1)
    to = instance.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    kind = tl.arange(0, KINDS)
    if tl.program_id(0) >= tl.load(counts_ptr + instance):
        tl.store(to_ids_ptr + to * TOP_K + kind, tl.full((KINDS,), -1, tl.int32), mask=kind < TOP_K)
    else:
        row = tl.load(rows_ptr + to).to(tl.int64)
        byte = tl.arange(0, BLOCK)
        x = tl.load(payload_ptr + row * row_bytes + byte, mask=byte < row_bytes)
        tl.store(to_payload_ptr + to * row_bytes + byte, x, mask=byte < row_bytes)
        if SCALE_BLOCK > 0:
            byte = tl.arange(0, SCALE_BLOCK)
            x = tl.load(scales_ptr + row * scale_bytes + byte, mask=byte < scale_bytes)
            tl.store(to_scales_ptr + to * scale_bytes + byte, x, mask=byte < scale_bytes)
        ids = tl.load(ids_ptr + row * TOP_K + kind, mask=kind < TOP_K)
        tl.store(to_ids_ptr + to * TOP_K + kind, ids, mask=kind < TOP_K)
        weights = tl.load(weights_ptr + row * TOP_K + kind, mask=kind < TOP_K)
        tl.store(to_weights_ptr + to * TOP_K + kind, weights, mask=kind < TOP_K)
