"""A draft layer (MTP) of an attention instance: one decoder layer that runs between the steps.

Knows neither vLLM nor the wire, as :mod:`attention_worker.pipeline`.
"""

from typing import Protocol

import torch

from attention_worker.pipeline import Experts, Layer


class DraftExperts(Experts, Protocol):
    """Remote experts that also compute draft layers: the host form."""

    def begin_step(self, depth: int, *, draft: bool = False) -> None: ...


def run_draft_layer(
    layer: Layer,
    remote: DraftExperts,
    positions: torch.Tensor,
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs one draft layer, as a step of its own: it runs once per draft token, after the step.

    Returns:
        FFN output and residual, model dtype [rows, hidden].
    """
    remote.begin_step(depth=1, draft=True)
    hidden, residual, encoded = layer.attention_half(positions, hidden, residual)
    with remote.sending(layer.index, 0, len(hidden)):
        weights, ids = layer.route(hidden)
        remote.send(layer.index, 0, hidden, ids, weights, encoded)
    output = remote.recv(0).clone()  # the next step overwrites the receive slot
    remote.end_step()
    return output, residual
