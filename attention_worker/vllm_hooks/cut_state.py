"""Attention metadata per micro-batch, from vLLM's second-generation runner.

That runner asks the state of its model for the metadata of a step (v1/worker/gpu/model_states).
Here each micro-batch gets its own, made by vLLM from a part of the step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_states.interface import ModelState
from vllm.v1.worker.utils import AttentionGroup

from attention_worker.vllm_hooks.cuts import CutBuffers, CutMetadata, cut_step

Groups: TypeAlias = list[list[AttentionGroup]]
"""Attention layers by KV-cache group and backend, with the builders of their metadata."""


@dataclass(frozen=True)
class Prepared:
    """What a step was prepared with, so that it can be run again.

    slot_mappings: int64 [KV-cache groups, rows with padding]; -1: padding.
    """

    batch: InputBatch
    metadata: dict[str, Any]
    slot_mappings: torch.Tensor
    kv_cache_config: KVCacheConfig


class CutState(ModelState):
    """Mixin for a class of vLLM's model states, in front of it. The runner changes the class of an
    existing one.

    Attributes:
        depth: number of micro-batches of the next metadata.
        prepared: of the last metadata; None: there is none yet.
    """

    depth: int
    prepared: Prepared | None

    def begin_cutting(self, max_depth: int, *, drafts: bool) -> None:
        """Comes before everything else, because ``__init__`` does not run.

        drafts: draft layers run behind a step, on the whole of it.
        """
        self.depth = 1
        self.prepared = None
        self._drafts = drafts
        self._buffers = CutBuffers(max_depth, self.max_num_reqs, self.device)
        self._groups: list[Groups] = []

    def set_builders(self, groups: Groups, kernel_block_sizes: Sequence[int], depth: int) -> None:
        """Makes builders for every micro-batch but the first, which has vLLM's, and for drafts.

        A builder has memory that captured graphs read, so micro-batches cannot share one.
        """
        self._groups = [groups]
        for _ in range(1, depth + self._drafts):
            own = [[replace(group, metadata_builders=[]) for group in found] for found in groups]
            for group in (group for found in own for group in found):
                number = group.kv_cache_group_id
                known = number < len(kernel_block_sizes)
                group.create_metadata_builders(
                    vllm_config=self.vllm_config,
                    device=self.device,
                    kernel_block_size=kernel_block_sizes[number] if known else None,
                )
            self._groups.append(own)

    def prepare_attn(
        self,
        input_batch: InputBatch,
        cudagraph_mode: CUDAGraphMode,
        block_tables: tuple[torch.Tensor, ...],
        slot_mappings: torch.Tensor,
        attn_groups: Groups,
        kv_cache_config: KVCacheConfig,
        *arguments: Any,
        **named: Any,
    ) -> dict[str, Any]:
        """Returns vLLM's metadata, or a :class:`CutMetadata` of a step with several micro-batches.

        Args:
            block_tables: per KV-cache group int32 [requests, blocks].
            slot_mappings: int64 [KV-cache groups, rows].
        """

        def made(
            batch: InputBatch,
            tables: tuple[torch.Tensor, ...],
            mappings: torch.Tensor,
            groups: Groups,
        ) -> dict[str, Any]:
            found: dict[str, Any] = super(CutState, self).prepare_attn(
                batch,
                cudagraph_mode,
                tables,
                mappings,
                groups,
                kv_cache_config,
                *arguments,
                **named,
            )
            return found

        if self.depth == 1:
            metadata = made(input_batch, block_tables, slot_mappings, attn_groups)
        else:
            cuts = cut_step(
                input_batch.query_start_loc_np[: input_batch.num_reqs + 1],
                input_batch.num_tokens_after_padding,
                input_batch.num_reqs_after_padding,
                self.depth,
            )
            parts = [
                made(
                    self._buffers.part(input_batch, index, cut),
                    tuple(table[cut.requests] for table in block_tables),
                    slot_mappings[:, cut.rows],
                    self._groups[index],
                )
                for index, cut in enumerate(cuts)
            ]
            whole: dict[str, Any] = {}
            if self._drafts:
                whole = made(input_batch, block_tables, slot_mappings, self._groups[-1])
            metadata = CutMetadata(parts, [cut.rows for cut in cuts], whole)
        self.prepared = Prepared(input_batch, metadata, slot_mappings, kv_cache_config)
        return metadata


def cutting(base: type[ModelState]) -> type[CutState]:
    """Returns a subclass of a vLLM class of model states that cuts steps."""
    made: type[CutState] = type(f"Cut{base.__name__}", (CutState, base), {})
    return made
