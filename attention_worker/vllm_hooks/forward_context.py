"""The micro-batches of a step, from vLLM's forward context."""

from dataclasses import replace
from functools import partial

import torch
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from attention_worker.pipeline import MicroBatch
from attention_worker.vllm_hooks.cuts import CutMetadata
from attention_worker.vllm_hooks.padding import padding_of


def micro_batches(hidden: torch.Tensor, positions: torch.Tensor) -> list[MicroBatch]:
    """Splits a step along the slices for which vLLM built attention metadata.

    Args:
        hidden: model dtype [tokens, hidden]. positions: [tokens].
    """
    on_gpu = hidden.device.type != "cpu"  # on CPU no step is padded to a captured size
    return [
        MicroBatch(
            index,
            partial(override_forward_context, own),
            positions[rows],
            hidden[rows],
            padding=padding_of(own.slot_mapping) if on_gpu else None,
        )
        for index, (own, rows) in enumerate(_contexts(get_forward_context()))
    ]


def _contexts(context: ForwardContext) -> list[tuple[ForwardContext, slice]]:
    """Returns the forward context and the rows of each micro-batch."""
    metadata = context.attn_metadata
    if isinstance(metadata, CutMetadata):  # second-generation runner
        return [
            (
                replace(context, attn_metadata=part, slot_mapping=_cut(context.slot_mapping, rows)),
                rows,
            )
            for part, rows in zip(metadata.parts, metadata.rows, strict=True)
        ]
    if context.ubatch_slices is None:
        return [(context, slice(None))]
    # Metadata and slot mappings are lists with one entry per micro-batch
    # (vllm/v1/worker/gpu_model_runner.py: _build_attention_metadata).
    return [
        (
            replace(
                context,
                attn_metadata=metadata[index],
                slot_mapping=context.slot_mapping[index],
                ubatch_slices=None,
            ),
            ubatch.token_slice,
        )
        for index, ubatch in enumerate(context.ubatch_slices)
    ]


def _cut(slot_mapping: dict[str, torch.Tensor], rows: slice) -> dict[str, torch.Tensor]:
    """Returns rows of the slot mapping of each layer, by layer name. Layers share tensors."""
    cut = {id(slots): slots[rows] for slots in slot_mapping.values()}
    return {name: cut[id(slots)] for name, slots in slot_mapping.items()}
