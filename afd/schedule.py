"""The pipeline as data: the order of a step's expert calls, and how deep a step runs. Pure."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Position:
    """One expert call of a step: a layer number of the model and a micro-batch index."""

    layer: int
    micro_batch: int


def walk(layers: Sequence[int], depth: int, start: Position | None = None) -> Iterator[Position]:
    """Positions of one step in execution order, the same on both sides of the wire.

    Args:
        layers: layer numbers whose FFN is remote, ascending.
        depth: number of micro-batches in flight.
        start: first position to yield; a step resumed after an FFN restart starts in the middle.
    """
    for layer in layers:
        for micro_batch in range(depth):
            position = Position(layer, micro_batch)
            if start is None or position >= start:
                yield position


def choose_depth(
    num_tokens: int, num_requests: int, max_depth: int, min_rows: int, *, splittable: bool = True
) -> int:
    """Number of micro-batches for a step of ``num_tokens`` rows of ``num_requests`` requests.

    Every micro-batch makes the FFN read its expert weights once more, so a batch too small to give
    each one ``min_rows`` rows runs at a smaller depth. A step of prefill chunks splits by rows; a
    chunk of one request may span micro-batches, because at every layer the earlier micro-batch
    writes its KV before the later one reads it.

    Args:
        splittable: False when a micro-batch would read KV blocks that a later one writes.
    """
    if not splittable or num_requests == 0:
        return 1
    return max(1, min(max_depth, num_tokens // max(1, min_rows)))


def split_rows(rows: int, depth: int) -> tuple[int, ...]:
    """Rows of each micro-batch of a step, by vLLM's rule: equal, the last one takes the rest.

    vllm/v1/worker/ubatch_utils.py: maybe_create_ubatch_slices. Both sides of the wire use it, so a
    step is announced by its number of rows.
    """
    each = rows // depth
    return (*[each] * (depth - 1), rows - each * (depth - 1))


def row_shares(rows: int, world: int) -> tuple[tuple[int, int], ...]:
    """Half-open range of ``rows`` rows per rank: contiguous, in rank order, the first ones one row
    longer, empty where there are fewer rows than ranks.

    Each rank of an FFN instance answers its own share of the rows that it was sent.
    """
    base, longer = divmod(rows, world)
    starts = [rank * base + min(rank, longer) for rank in range(world + 1)]
    return tuple(itertools.pairwise(starts))


def padded_depth(depth: int, num_tokens: int, padded: int) -> int:
    """The largest depth <= ``depth`` at which no micro-batch of a padded step is all padding.

    Args:
        num_tokens, padded: rows of the step without and with the padding up to a captured size.
    """
    while depth > 1 and padded // depth * (depth - 1) >= num_tokens:
        depth -= 1
    return depth


def stream_sequence(position: int) -> int:
    """Low half of the doorbell of a step's ``position``-th expert call, rung by a stream.

    A captured graph rings the same doorbells each time it is replayed, so they number positions and
    not messages. The top bit keeps them apart from the sequence numbers of messages that the host
    posts into the same slot.
    """
    return 0x8000_0000 | position


def resets_doorbells(layers: Sequence[int]) -> bool:
    """Whether a stream that waits for a doorbell has to set it back to 0 behind the wait.

    Two messages that follow each other in a slot must ring differently. Within a step they do, and
    the last of one step and the first of the next do unless a step uses each slot just once. A
    reset costs about a microsecond per wait (docs/results/notes.md).

    Args:
        layers: layer numbers whose FFN is remote.
    """
    return len(layers) == 1


def reads_block_written_in_step(
    new_request_prefix_blocks: Sequence[Sequence[int]], written_blocks: Sequence[Sequence[int]]
) -> bool:
    """Whether a request that starts in this step reads KV blocks another one writes in it.

    vLLM registers prefix-cache blocks when it schedules them, so a request can hit blocks that a
    request of the same step is still to fill (vllm/v1/core/kv_cache_manager.py: allocate_slots).
    An unsplit step is safe, since each layer writes all KV before attention reads it; a split one
    is not when the reader's micro-batch comes first.

    Args:
        new_request_prefix_blocks: per starting request, the blocks of its cached prefix.
        written_blocks: per scheduled request, the blocks this step writes.
    """
    prefixes = {block for blocks in new_request_prefix_blocks for block in blocks}
    return any(not prefixes.isdisjoint(blocks) for blocks in written_blocks)
