"""One decoder layer as the pipeline sees it: an attention half, then a remote or a local FFN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from afd.models import Family
from afd.wire.rows_torch import EncodedRows

Router = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""hidden [rows, hidden] -> weights float32 and expert ids int32, both [rows, top_k]."""
PostNorm = Callable[
    [torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor, EncodedRows | None]
]
"""Attention output and residual, both [rows, hidden] -> the FFN's input, the new residual, and the
input as the wire carries it, or None."""


class LayerHalves:
    """The attention half of a vLLM decoder layer, and its router or its dense FFN.

    The attention half is the same in every pipelined family: norm, attention, residual, norm (the
    DecoderLayer.forward of each file in vllm/model_executor/models that afd/models names). Only the
    names of the modules differ, and they are data of the family.
    """

    def __init__(self, layer: Any, index: int, family: Family, router: Router | None) -> None:
        """layer: vLLM's decoder layer module. router: None if the layer has no experts."""
        self.index = index
        self.is_remote = router is not None
        self._router = router
        self._input_norm: nn.Module = layer.input_layernorm
        self.attention: nn.Module = layer.get_submodule(family.attention)
        self._attend: Callable[..., torch.Tensor] = self.attention
        self._attention_args = dict.fromkeys(family.attention_none)
        self.post_norm: nn.Module = layer.post_attention_layernorm
        self._fused_norm: PostNorm | None = None
        self._dense_ffn: nn.Module | None = (
            None if router is not None else layer.get_submodule(family.dense)
        )

    def fuse(
        self, attention: Callable[..., torch.Tensor] | None, post_norm: PostNorm | None
    ) -> None:
        """Replaces the attention module's forward, or the norm behind it, by fused ones; None: it
        stays. post_norm: of a remote layer only."""
        if attention is not None:
            self._attend = attention
        self._fused_norm = post_norm

    def attention_half(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, EncodedRows | None]:
        """Returns the input of the FFN, the new residual, and the input as the wire carries it, if
        the norm encodes it too, else None.

        All tensors: model dtype [rows, hidden]; positions: [rows].
        """
        if residual is None:
            residual = hidden
            hidden = self._input_norm(hidden)
        else:
            hidden, residual = self._input_norm(hidden, residual)
        hidden = self._attend(positions=positions, hidden_states=hidden, **self._attention_args)
        if self._fused_norm is not None:
            return self._fused_norm(hidden, residual)
        ffn_input, new_residual = self.post_norm(hidden, residual)
        return ffn_input, new_residual, None

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns weights float32 and expert ids int32, both [rows, top_k], of a remote layer."""
        assert self._router is not None
        return self._router(hidden)

    def local_ffn(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the output of the dense FFN of a layer without experts."""
        assert self._dense_ffn is not None
        output: torch.Tensor = self._dense_ffn(hidden)
        return output
