"""The exact answers of `afd bench scale`: the whole model in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from afd.config.deployment import Deployment
from afd.config.resolve import resolve
from ffn_worker.experts.build import load_ffn_model

Floats = npt.NDArray[np.float32]
Forward = Callable[[int, Floats, npt.NDArray[np.int32], Floats], Floats]


def reference(checkpoint: Path) -> tuple[Forward, tuple[int, ...], int]:
    """Returns (layer, x, ids, weights) -> answer, the MoE layers, and the experts per layer."""
    deployment = Deployment.from_plain(
        {"model": str(checkpoint), "attention": {"dtype": "float32"}}
    )
    resolved = resolve(deployment)
    model = load_ffn_model(
        deployment.model,
        resolved.family,
        resolved.model,
        instances=1,
        index=0,
        backend="reference",
    )

    def forward(layer: int, x: Floats, ids: npt.NDArray[np.int32], weights: Floats) -> Floats:
        with torch.inference_mode():
            out = model.forward(layer, *(torch.from_numpy(a) for a in (x, ids, weights)))
        answer: Floats = out.numpy()
        return answer

    return forward, resolved.model.moe_layers, resolved.model.num_experts
