"""The ranks of an attention instance are those of vLLM's tensor-parallel group."""

import torch
from vllm.distributed.communication_op import tensor_model_parallel_all_gather
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
)

from attention_worker.ranks import Ranks


def ranks_of_group() -> Ranks:
    """Returns the ranks of this process's group. Its collectives are vLLM's own: gloo on CPUs (see
    :func:`attention_worker.vllm_hooks.store.file_store`), NCCL or RCCL on GPUs."""
    count = get_tensor_model_parallel_world_size()
    if count == 1:
        return Ranks()
    return Ranks(get_tensor_model_parallel_rank(), count, _gather, _agree)


def _gather(rows: torch.Tensor) -> torch.Tensor:
    gathered: torch.Tensor = tensor_model_parallel_all_gather(rows.contiguous(), dim=0)
    return gathered


def _agree(value: int) -> int:
    agreed: int = get_tp_group().broadcast_object(value, src=0)
    return agreed
