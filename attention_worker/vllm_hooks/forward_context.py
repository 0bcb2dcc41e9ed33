"""The micro-batches of a step, from vLLM's forward context."""

from dataclasses import replace
from functools import partial

import torch
from vllm.forward_context import get_forward_context, override_forward_context

from attention_worker.pipeline import MicroBatch
from attention_worker.vllm_hooks.padding import padding_of


def micro_batches(hidden: torch.Tensor, positions: torch.Tensor) -> list[MicroBatch]:
    """Splits a step along the slices for which vLLM built attention metadata.

    With slices, the metadata and slot mappings of the forward context are lists with one entry per
    micro-batch (vllm/v1/worker/gpu_model_runner.py: _build_attention_metadata).

    Args:
        hidden: model dtype [tokens, hidden]. positions: [tokens].
    """
    context = get_forward_context()
    if context.ubatch_slices is None:
        contexts, slices = [context], [slice(None)]
    else:
        slices = [ubatch.token_slice for ubatch in context.ubatch_slices]
        contexts = [
            replace(
                context,
                attn_metadata=context.attn_metadata[index],
                slot_mapping=context.slot_mapping[index],
                ubatch_slices=None,
            )
            for index in range(len(slices))
        ]
    on_gpu = hidden.device.type != "cpu"  # on CPU no step is padded to a captured size
    return [
        MicroBatch(
            index,
            partial(override_forward_context, own),
            positions[rows],
            hidden[rows],
            padding=padding_of(own.slot_mapping) if on_gpu else None,
        )
        for index, (own, rows) in enumerate(zip(contexts, slices, strict=True))
    ]
