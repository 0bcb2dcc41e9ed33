"""Which rows of a step belong to no request."""

from collections.abc import Mapping

import torch


def padding_of(slot_mapping: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Rows that only fill a step up to the size of its graph: bool [rows, 1]; None before there is
    a KV cache.

    vLLM marks them itself, in memory that a captured graph reads at each replay, so that their keys
    are not written: their slot in the KV cache is -1 (gpu_model_runner.py: _get_slot_mappings).

    Args:
        slot_mapping: of one micro-batch, by layer name, int64 [rows]. All layers have the same
            padding.
    """
    of_a_layer = next(iter(slot_mapping.values()), None)
    return None if of_a_layer is None else (of_a_layer < 0).unsqueeze(1)
