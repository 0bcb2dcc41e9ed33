"""Cuts an engine step of vLLM's second-generation runner into micro-batches. Imports no vLLM.

A cut has equal numbers of rows (:func:`afd.schedule.split_rows`), so it may go through a request:
its later rows are then in the next micro-batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from afd.schedule import split_rows

Starts = npt.NDArray[np.int32]
"""First row of each request of a step, and the number of rows: int32 [requests + 1]."""


@dataclass(frozen=True)
class Cut:
    """The rows and the requests of one micro-batch; the requests of which it has any row.

    behind: rows of its last request that are in later micro-batches.
    """

    rows: slice
    requests: slice
    behind: int


def cut_step(starts: Starts, padded_rows: int, padded_requests: int, depth: int) -> list[Cut]:
    """Returns the micro-batches of a step. Rows and requests that only pad are in the last one.

    Args:
        starts: without padding.
        depth: no micro-batch may consist of padding only (:func:`afd.schedule.padded_depth`).
    """
    cuts: list[Cut] = []
    first = 0
    for rows in split_rows(padded_rows, depth):
        end = first + rows
        begin = int(np.searchsorted(starts, first, side="right")) - 1
        stop = int(np.searchsorted(starts, end, side="left"))
        if len(cuts) == depth - 1:
            cuts.append(Cut(slice(first, end), slice(begin, padded_requests), 0))
        else:
            behind = int(starts[stop]) - end
            cuts.append(Cut(slice(first, end), slice(begin, stop), behind))
        first = end
    return cuts


class CutMetadata(dict[str, Any]):
    """Attention metadata of a step, one by one for its micro-batches.

    vLLM hands it on, as the metadata of layers by their names, to the forward context of the model
    (:mod:`attention_worker.vllm_hooks.forward_context`), and to that of draft layers, which run on
    the whole step. Only those read it by name.

    parts: metadata by layer name, one per micro-batch. rows: of each micro-batch. whole: of the
        step, by layer name; empty without draft layers.
    """

    def __init__(
        self,
        parts: Sequence[dict[str, Any]],
        rows: Sequence[slice],
        whole: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__(whole)
        self.parts = tuple(parts)
        self.rows = tuple(rows)


class CutBuffers:
    """Memory for what metadata of micro-batches reads and the step has in another form.

    A captured graph reads it at each replay, so a micro-batch always has the same.
    """

    def __init__(self, depth: int, max_requests: int, device: torch.device) -> None:
        self._starts = torch.zeros((depth, max_requests + 1), dtype=torch.int32, device=device)
        self._lengths = torch.zeros((depth, max_requests), dtype=torch.int32, device=device)

    def part(self, batch: Any, index: int, cut: Cut) -> Any:
        """Returns the part of a vLLM ``InputBatch`` (v1/worker/gpu/input_batch.py) that attention
        metadata is made from. Its inputs of the model stay those of the whole step."""
        first, end, requests = cut.rows.start, cut.rows.stop, cut.requests
        count = requests.stop - requests.start
        bounds = slice(requests.start, requests.stop + 1)
        starts_np = np.clip(batch.query_start_loc_np[bounds] - first, 0, end - first)
        starts = self._starts[index, : count + 1]
        torch.sub(batch.query_start_loc[bounds], first, out=starts)
        starts.clamp_(0, end - first)
        lengths = self._lengths[index, :count]
        lengths.copy_(batch.seq_lens[requests])
        at_most = batch.seq_lens_cpu_upper_bound[requests].clone()
        if cut.behind:
            lengths[-1:] -= cut.behind
            at_most[-1:] -= cut.behind
        real = min(requests.stop, batch.num_reqs) - requests.start
        prompts = batch.prompt_lens
        return replace(
            batch,
            req_ids=batch.req_ids[requests],
            num_reqs=real,
            num_reqs_after_padding=count,
            idx_mapping=batch.idx_mapping[requests],
            idx_mapping_np=batch.idx_mapping_np[requests],
            num_scheduled_tokens=np.diff(starts_np),
            num_tokens=min(end, batch.num_tokens) - first,
            num_tokens_after_padding=end - first,
            query_start_loc=starts,
            query_start_loc_np=starts_np,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=at_most,
            is_prefilling_np=batch.is_prefilling_np[requests],
            positions=batch.positions[cut.rows],
            prompt_lens=None if prompts is None else prompts[requests],
        )
