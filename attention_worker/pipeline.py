"""The layer pipeline of an attention instance: one explicit loop over layers and micro-batches."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn
from vllm.forward_context import ForwardContext, get_forward_context, override_forward_context

from attention_worker.padding import padding_of


class Layer(Protocol):
    """What the loop needs of a decoder layer; see :class:`attention_worker.model.LayerHalves`."""

    index: int
    is_remote: bool

    def attention_half(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]: ...

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def local_ffn(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Experts(Protocol):
    """The remote half of a layer, as the loop calls it: by messages from the host
    (:class:`attention_worker.remote.RemoteExperts`) or by operations of GPU streams
    (:class:`attention_worker.stream.StreamExperts`)."""

    def begin_step(self, depth: int) -> None: ...

    def sending(self, layer: int, micro_batch: int, rows: int) -> AbstractContextManager[object]:
        """Around the work that only a message needs, :meth:`send` being the last of it: where there
        are streams, the next micro-batch does not wait for it."""

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> None: ...

    def recv(self, micro_batch: int) -> torch.Tensor: ...

    def end_step(self) -> None: ...


@dataclass
class MicroBatch:
    """Running state of one micro-batch. Tensors: model dtype [rows, hidden]; positions [rows].

    padding: bool [rows, 1], see :func:`attention_worker.padding.padding_of`; None: there is none.
    """

    index: int
    context: ForwardContext
    positions: torch.Tensor
    hidden: torch.Tensor
    residual: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    in_flight: bool = False


def run_layers(
    layers: Sequence[Layer],
    norm: nn.Module,
    remote: Experts,
    hidden: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """All decoder layers and the final norm; answers hidden states [tokens, hidden].

    While one micro-batch is in attention here, the one before it is on the wire and the one before
    that is in the FFN (Step-3 report, section 3: three stages). ``recv`` is the only place where
    this side waits.
    """
    batches = micro_batches(hidden, positions)
    remote.begin_step(depth=len(batches))
    for layer in layers:
        for batch in batches:
            if batch.in_flight:
                batch.hidden = remote.recv(batch.index)
                batch.in_flight = False
            with override_forward_context(batch.context):
                batch.hidden, batch.residual = layer.attention_half(
                    batch.positions, batch.hidden, batch.residual
                )
                if layer.is_remote:
                    with remote.sending(layer.index, batch.index, len(batch.hidden)):
                        weights, ids = layer.route(batch.hidden)
                        if batch.padding is not None:
                            ids.masked_fill_(batch.padding, -1)  # no expert computes these rows
                        remote.send(layer.index, batch.index, batch.hidden, ids, weights)
                    batch.in_flight = True
                else:
                    batch.hidden = layer.local_ffn(batch.hidden)
    for batch in batches:
        if batch.in_flight:
            batch.hidden = remote.recv(batch.index)
    outputs = [norm(batch.hidden, batch.residual)[0] for batch in batches]
    remote.end_step()
    return torch.cat(outputs)  # also for one: its memory may be a slot that the next step writes


def micro_batches(hidden: torch.Tensor, positions: torch.Tensor) -> list[MicroBatch]:
    """Cut a step along the slices for which vLLM built attention metadata.

    With slices, the metadata and slot mappings of the forward context are lists with one entry per
    micro-batch (vllm/v1/worker/gpu_model_runner.py: _build_attention_metadata).
    """
    context = get_forward_context()
    if context.ubatch_slices is None:
        batches = [MicroBatch(0, context, positions, hidden)]
    else:
        batches = [
            MicroBatch(
                index,
                replace(
                    context,
                    attn_metadata=context.attn_metadata[index],
                    slot_mapping=context.slot_mapping[index],
                    ubatch_slices=None,
                ),
                positions[piece.token_slice],
                hidden[piece.token_slice],
            )
            for index, piece in enumerate(context.ubatch_slices)
        ]
    if hidden.device.type != "cpu":  # there no step is padded up to a captured size
        for batch in batches:
            batch.padding = padding_of(batch.context.slot_mapping)
    return batches
