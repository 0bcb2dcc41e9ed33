"""The depth of each step of vLLM's second-generation runner.

That runner asks its graph manager for the size and the mode of a step, before it prepares its
inputs (v1/worker/gpu/cudagraph_utils.py: CudaGraphManager.dispatch).
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from attention_worker.vllm_hooks.cut_state import CutState

DepthOf = Callable[[int, int, int | None, BatchExecutionDescriptor], int]
"""Requests, rows, rows of each request or None if they differ, vLLM's decision -> depth."""


class DepthDispatch(CudaGraphManager):
    """Decides with vLLM about each step. The runner changes the class of an existing manager."""

    def begin_dispatch(self, state: CutState, depth_of: DepthOf) -> None:
        """Comes before everything else, because ``__init__`` does not run."""
        self._state = state
        self._depth_of = depth_of

    def dispatch(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_token_count: int | None,
        num_active_loras: int,
        *arguments: Any,
        **named: Any,
    ) -> BatchExecutionDescriptor:
        """Returns vLLM's decision, and sets the depth."""
        decision = super().dispatch(
            num_reqs, num_tokens, uniform_token_count, num_active_loras, *arguments, **named
        )
        self._state.depth = self._depth_of(num_reqs, num_tokens, uniform_token_count, decision)
        return decision


class EagerManager(ModelCudaGraphManager, DepthDispatch):
    """vLLM's manager where no step is captured."""
