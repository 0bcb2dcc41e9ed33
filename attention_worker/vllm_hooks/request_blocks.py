"""The KV-cache blocks of the requests of vLLM's second-generation runner. Imports no vLLM.

That runner has them on the device only. The depth of a step depends on them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from afd.schedule import reads_block_written_in_step

Blocks = tuple[list[int], ...]
"""Per KV-cache group: numbers of blocks, in the order of tokens."""


class RequestBlocks:
    """Follows vLLM's scheduler, whose outputs it reads (v1/core/sched/output.py)."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        """block_sizes: tokens per block, by KV-cache group."""
        self._sizes = tuple(block_sizes)
        self._of: dict[str, Blocks] = {}

    def update(self, scheduled: Any) -> None:
        """Takes over what a ``SchedulerOutput`` says of requests and blocks."""
        for ended in (scheduled.finished_req_ids, scheduled.preempted_req_ids or ()):
            for request in ended:
                self._of.pop(request, None)
        for new in scheduled.scheduled_new_reqs:
            self._of[new.req_id] = tuple(list(blocks) for blocks in new.block_ids)
        cached = scheduled.scheduled_cached_reqs
        for request, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is not None:
                for blocks, more in zip(self._of[request], added, strict=True):
                    blocks.extend(more)

    def prefix_hazard(self, scheduled: Any) -> bool:
        """Returns whether a request starts on prefix blocks that the same step fills."""
        starting = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        if not any(starting.values()):
            return False
        cached = scheduled.scheduled_cached_reqs
        computed: Mapping[str, int] = starting | dict(
            zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        )
        prefixes: list[list[int]] = []
        written: list[list[int]] = []
        for group, size in enumerate(self._sizes):
            for request, rows in scheduled.num_scheduled_tokens.items():
                blocks, done = self._of[request][group], computed[request]
                written.append(blocks[done // size : -(-(done + rows) // size)])
                if request in starting:
                    prefixes.append(blocks[: done // size])
        return reads_block_written_in_step(prefixes, written)
