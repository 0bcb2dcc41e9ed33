"""The pipeline as data: the order of a step's expert calls and its depth. Pure functions."""

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Position(NamedTuple):
    """One expert call of a step: a layer number of the model and a micro-batch index from 0."""

    layer: int
    micro_batch: int


def walk(layers: Sequence[int], depth: int, start: Position | None = None) -> Iterator[Position]:
    """Yields the positions of one step in execution order. Both sides of the wire use this order.

    Args:
        layers: numbers of the layers whose FFN is remote, ascending.
        depth: number of micro-batches.
        start: first position to yield. A step that resumes after an FFN restart starts in the
            middle.
    """
    for layer in layers:
        for micro_batch in range(depth):
            position = Position(layer, micro_batch)
            if start is None or position >= start:
                yield position


def choose_depth(
    num_tokens: int, num_requests: int, max_depth: int, min_rows: int, *, splittable: bool = True
) -> int:
    """Returns the number of micro-batches of a step.

    Each micro-batch makes the FFN read its expert weights again, so a step with fewer than
    ``min_rows`` rows per micro-batch runs at a smaller depth. A prefill step splits by rows. A
    chunk of one request may span micro-batches: at every layer the earlier one writes its KV before
    the later one reads it.

    Args:
        num_tokens, num_requests: rows and requests of the step.
        splittable: False if a micro-batch would read KV blocks that a later one writes.
    """
    if not splittable or num_requests == 0:
        return 1
    return max(1, min(max_depth, num_tokens // max(1, min_rows)))


def split_rows(rows: int, depth: int) -> tuple[int, ...]:
    """Returns the rows of each micro-batch of a step: equal, with the remainder in the last one.

    This is vLLM's rule (vllm/v1/worker/ubatch_utils.py: maybe_create_ubatch_slices). Both sides use
    it, so announcing a step takes only its number of rows.
    """
    each = rows // depth
    return (*[each] * (depth - 1), rows - each * (depth - 1))


def row_shares(rows: int, world: int) -> tuple[tuple[int, int], ...]:
    """Returns each rank's share of ``rows`` rows: one half-open range per rank, in rank order.

    Each rank of an FFN instance returns its share of the rows that the instance received. Shares
    differ by at most one row, the first ones are larger, and some are empty if rows < ranks.
    """
    base, longer = divmod(rows, world)
    starts = [rank * base + min(rank, longer) for rank in range(world + 1)]
    return tuple(itertools.pairwise(starts))


def padded_depth(depth: int, num_tokens: int, padded: int) -> int:
    """Returns the largest depth <= ``depth`` at which no micro-batch consists of padding only.

    Args:
        num_tokens: rows of the step without padding.
        padded: rows of the step with padding to a captured size.
    """
    while depth > 1 and padded // depth * (depth - 1) >= num_tokens:
        depth -= 1
    return depth


def stream_sequence(position: int) -> int:
    """Returns the low half (u32) of the doorbell that a stream rings for a step's expert call.

    A captured graph rings the same doorbells at every replay, so they number positions, not
    messages. The top bit distinguishes them from the sequence numbers of messages that the host
    posts into the same slot.

    Args:
        position: number of the expert call within the step, from 0.
    """
    return 0x8000_0000 | position


def resets_doorbells(layers: Sequence[int]) -> bool:
    """Whether a stream must reset a doorbell to 0 after waiting for it.

    Two consecutive messages of a slot must ring different values. They do, except between steps
    that use each slot only once, which happens with a single layer. A reset costs about 1 us per
    wait (docs/lab/notes.md).

    Args:
        layers: numbers of the layers whose FFN is remote.
    """
    return len(layers) == 1


def reads_block_written_in_step(
    new_request_prefix_blocks: Sequence[Sequence[int]], written_blocks: Sequence[Sequence[int]]
) -> bool:
    """Whether a request that starts in this step reads KV blocks that the same step writes.

    vLLM registers prefix-cache blocks when it schedules them, so a request can hit blocks that
    another request of the same step has yet to fill (vllm/v1/core/kv_cache_manager.py:
    allocate_slots). An unsplit step is safe: each layer writes all KV before attention reads it. A
    split step is not safe if the reader's micro-batch comes first.

    Args:
        new_request_prefix_blocks: per starting request, the blocks of its cached prefix.
        written_blocks: per scheduled request, the blocks that this step writes.
    """
    prefixes = {block for blocks in new_request_prefix_blocks for block in blocks}
    return any(not prefixes.isdisjoint(blocks) for blocks in written_blocks)
