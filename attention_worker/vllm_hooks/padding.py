"""Which rows of a step belong to no request. Imports no vLLM."""

from collections.abc import Mapping

import torch


def padding_of(slot_mapping: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Returns which rows only pad the step to the size of its graph, bool [rows, 1].

    vLLM gives such rows the KV-cache slot -1, so that their keys are not written
    (gpu_model_runner.py: _get_slot_mappings). It does so in memory that a captured graph reads at
    each replay.

    Args:
        slot_mapping: of one micro-batch: layer name -> int64 [rows]. All layers have the same
            padding. Empty before vLLM has a KV cache; then the result is None.
    """
    of_a_layer = next(iter(slot_mapping.values()), None)
    return None if of_a_layer is None else (of_a_layer < 0).unsqueeze(1)
