"""Triton kernels over several messages: take rows out of slots, and add up answers.

:mod:`afd.wire.slot_gpu_torch` launches them. All slots of a region have the same layout. So the
kernels get the tensors of the first slot, and the distance of every other slot from it in units of
16 bytes (slots start on a cache line).
"""

import triton
import triton.language as tl

# Triton must not compile a specialisation for particular values of these arguments.
FAR = [f"far{i}" for i in range(1, 8)]
_BEGIN = [f"begin{i}" for i in range(1, 8)]


@triton.jit(do_not_specialize=[*FAR, *_BEGIN, "masked"])
def take_rows_kernel(
    payload_ptr, scales_ptr, ids_ptr, weights_ptr, to_payload_ptr, to_scales_ptr, to_ids_ptr,
    to_weights_ptr, far1, far2, far3, far4, far5, far6, far7,
    begin1, begin2, begin3, begin4, begin5, begin6, begin7, masked, row_bytes, scale_bytes,
    MESSAGES: tl.constexpr, TOP_K: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the rows of MESSAGES messages to consecutive rows; message i starts at row ``begin``i.

    payload uint8 [.., row_bytes]; scales uint8 [.., scale_bytes] (SCALE_BLOCK 0: none);
    ids int32 and weights float32 [.., TOP_K]. ``masked``: bit i set means that
    message i's ids become -1. KINDS, BLOCK, SCALE_BLOCK: TOP_K, row_bytes and scale_bytes rounded
    up to powers of two. Grid (rows).
    """
    far = (0, far1, far2, far3, far4, far5, far6, far7)
    begin = (0, begin1, begin2, begin3, begin4, begin5, begin6, begin7)
    to = tl.program_id(0).to(tl.int64)
    away, first, message = to * 0, to * 0, to * 0
    for i in tl.static_range(1, MESSAGES):
        here = to >= begin[i]
        away = tl.where(here, far[i], away)
        first = tl.where(here, begin[i], first)
        message += here.to(tl.int64)
    row = to - first
    byte = tl.arange(0, BLOCK)
    x = tl.load(payload_ptr + away * 16 + row * row_bytes + byte, mask=byte < row_bytes)
    tl.store(to_payload_ptr + to * row_bytes + byte, x, mask=byte < row_bytes)
    if SCALE_BLOCK > 0:
        byte = tl.arange(0, SCALE_BLOCK)
        x = tl.load(scales_ptr + away * 16 + row * scale_bytes + byte, mask=byte < scale_bytes)
        tl.store(to_scales_ptr + to * scale_bytes + byte, x, mask=byte < scale_bytes)
    kind = tl.arange(0, KINDS)
    at, inside = away * 4 + row * TOP_K + kind, kind < TOP_K
    ids = tl.load(ids_ptr + at, mask=inside)
    ids = tl.where((masked >> message) & 1 != 0, -1, ids)
    tl.store(to_ids_ptr + to * TOP_K + kind, ids, mask=inside)
    weights = tl.load(weights_ptr + at, mask=inside)
    tl.store(to_weights_ptr + to * TOP_K + kind, weights, mask=inside)


@triton.jit(do_not_specialize=["apart", "bucket", "tp"])
def take_bucket_kernel(
    payload_ptr, scales_ptr, ids_ptr, weights_ptr, to_payload_ptr, to_scales_ptr, to_ids_ptr,
    to_weights_ptr, rows_ptr, apart, bucket, tp, row_bytes, scale_bytes,
    TOP_K: tl.constexpr, KINDS: tl.constexpr, BLOCK: tl.constexpr, SCALE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy rows_ptr[i] rows of each message i into ``bucket`` rows; the others: zeros, ids -1.

    Message i begins i * ``apart`` * 16 bytes behind the first one. Within the bucket each of ``tp``
    ranks has a share, which begins with its share of the message (afd.schedule.row_shares). Types
    and sizes as in take_rows_kernel; rows int32 [messages]. Grid (messages * bucket).
    """
    to = tl.program_id(0).to(tl.int64)
    message = to // bucket
    place = to - message * bucket
    # Which rank's share of the bucket the row is in, and where in the share.
    base, longer = bucket // tp, bucket % tp
    cut = longer * (base + 1)
    beyond = longer + (place - cut) // tl.maximum(base, 1)
    rank = tl.where(place < cut, place // (base + 1), beyond)
    within = place - (rank * base + tl.minimum(rank, longer))
    # The same rank's share of the message.
    sent = tl.load(rows_ptr + message)
    base, longer = sent // tp, sent % tp
    inside = within < base + (rank < longer).to(tl.int32)
    row = rank * base + tl.minimum(rank, longer) + within
    away = message * apart
    byte = tl.arange(0, BLOCK)
    x = tl.load(
        payload_ptr + away * 16 + row * row_bytes + byte,
        mask=inside & (byte < row_bytes), other=0,
    )  # fmt: skip
    tl.store(to_payload_ptr + to * row_bytes + byte, x, mask=byte < row_bytes)
    if SCALE_BLOCK > 0:
        byte = tl.arange(0, SCALE_BLOCK)
        x = tl.load(
            scales_ptr + away * 16 + row * scale_bytes + byte,
            mask=inside & (byte < scale_bytes), other=0,
        )  # fmt: skip
        tl.store(to_scales_ptr + to * scale_bytes + byte, x, mask=byte < scale_bytes)
    kind = tl.arange(0, KINDS)
    at = away * 4 + row * TOP_K + kind
    ids = tl.load(ids_ptr + at, mask=inside & (kind < TOP_K), other=-1)
    tl.store(to_ids_ptr + to * TOP_K + kind, ids, mask=kind < TOP_K)
    weights = tl.load(weights_ptr + at, mask=inside & (kind < TOP_K), other=0.0)
    tl.store(to_weights_ptr + to * TOP_K + kind, weights, mask=kind < TOP_K)


@triton.jit
def sum_of_messages(
    payload_ptr, scales_ptr, row, column, hidden, inside,
    far1, far2, far3, far4, far5, far6, far7, MESSAGES: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """float32 sum, in message order, of the values at ``row`` (int64) and ``column``. SCALED: the
    values have float32 scales, one per 128 columns."""
    far = (0, far1, far2, far3, far4, far5, far6, far7)
    each: tl.constexpr = 128 // payload_ptr.dtype.element_ty.primitive_bitwidth
    total = tl.zeros(column.shape, dtype=tl.float32)
    for i in tl.static_range(MESSAGES):
        away = tl.zeros((), tl.int64) + far[i]
        at = payload_ptr + away * each + row * hidden + column
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if SCALED:
            at = scales_ptr + away * 4 + row * (hidden // 128) + column // 128
            x *= tl.load(at, mask=inside, other=0.0)
        total += x
    return total


@triton.jit(do_not_specialize=FAR)
def sum_messages_kernel(
    payload_ptr, scales_ptr, out_ptr, far1, far2, far3, far4, far5, far6, far7, hidden,
    MESSAGES: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = sum of that row in each of MESSAGES answers, in float32, rounded once.

    payload [.., hidden] of any float type; scales float32 [.., hidden / 128] with SCALED. Grid
    (rows, ceil(hidden / BLOCK)).
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = sum_of_messages(
        payload_ptr, scales_ptr, row, column, hidden, inside,
        far1, far2, far3, far4, far5, far6, far7, MESSAGES, SCALED,
    )  # fmt: skip
    tl.store(out_ptr + row * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["instances", "tp"])
def sum_places_kernel(
    payload_ptr, scales_ptr, of_rows_ptr, far_ptr, out_ptr, hidden, instances, tp,
    SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row] = sum of the answers to a row by the instances that got it, in float32 and in their
    order, rounded once.

    of_rows: int32 [instances, rows], the place of the row in an instance's answer; -1: none. The
    ``tp`` ranks of an instance answer a share of the places each (afd.schedule.row_shares). far:
    int64 [instances * tp], distance of each rank's answer from the first, in units of 16 bytes.
    payload [.., hidden] of any float type; scales float32 [.., hidden / 128] with SCALED. Grid
    (rows, ceil(hidden / BLOCK)).
    """
    row, rows = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    each: tl.constexpr = 128 // payload_ptr.dtype.element_ty.primitive_bitwidth
    base, longer = rows // tp, rows % tp
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(0, instances):
        place = tl.load(of_rows_ptr + j * rows + row)
        if place >= 0:
            rank = place // (base + 1)
            start = rank * (base + 1)
            if place >= longer * (base + 1):
                rank = longer + (place - longer * (base + 1)) // base
                start = rank * base + longer
            away = tl.load(far_ptr + j * tp + rank)
            at = (place - start).to(tl.int64)
            x = tl.load(payload_ptr + away * each + at * hidden + column, mask=inside, other=0.0)
            x = x.to(tl.float32)
            if SCALED:
                scale = scales_ptr + away * 4 + at * (hidden // 128) + column // 128
                x *= tl.load(scale, mask=inside, other=0.0)
            total += x
    tl.store(out_ptr + row.to(tl.int64) * hidden + column, total.to(out_ptr.dtype.element_ty),
             mask=inside)  # fmt: skip
