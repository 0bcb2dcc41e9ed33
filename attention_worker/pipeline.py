"""The layer pipeline of an attention instance: one loop over layers and micro-batches.

Knows neither vLLM nor the wire: layers, remote experts and micro-batches are passed in.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn

from afd.wire.rows_torch import EncodedRows


class Layer(Protocol):
    """A decoder layer; see :class:`attention_worker.model.LayerHalves`."""

    index: int
    is_remote: bool

    def attention_half(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, EncodedRows | None]: ...

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def local_ffn(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Experts(Protocol):
    """The remote half of the layers.

    The host form sends messages and waits (:class:`attention_worker.remote.host.RemoteExperts`).
    The stream form queues the same work on GPU streams
    (:class:`attention_worker.remote.stream.StreamExperts`).
    """

    def begin_step(self, depth: int) -> None: ...

    def sending(self, layer: int, micro_batch: int, rows: int) -> AbstractContextManager[object]:
        """Returns a context that encloses the router and :meth:`send`: work that no later attention
        half needs. The stream form runs it on a stream of its own, so that the attention half of
        the next micro-batch does not wait for it."""

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        encoded: EncodedRows | None = None,
    ) -> None:
        """Sends the rows of one micro-batch. Does not wait for the answers.

        encoded: the rows in the format of the wire; None: ``hidden`` has to be encoded.
        """

    def recv(self, micro_batch: int) -> torch.Tensor:
        """Waits for the answers to a micro-batch. Returns the FFN output of its rows."""

    def end_step(self) -> None: ...


@dataclass
class MicroBatch:
    """One micro-batch of a step: its inputs and its running state.

    activate: returns the context in which its attention runs: vLLM's forward context of this
        micro-batch.
    positions: [rows]. hidden, residual: model dtype [rows, hidden].
    padding: bool [rows, 1], True for rows that belong to no request; None: there are no such rows.
    in_flight: sent to the experts; the answers have not been received.
    tapped: inputs of the layers that a draft model reads, model dtype [rows, hidden] each.
    """

    index: int
    activate: Callable[[], AbstractContextManager[object]]
    positions: torch.Tensor
    hidden: torch.Tensor
    residual: torch.Tensor | None = None
    padding: torch.Tensor | None = None
    in_flight: bool = False
    tapped: list[torch.Tensor] = field(default_factory=list)

    def tap(self) -> None:
        """Keeps a copy of the input of the next layer: the later ones work in place."""
        added = self.hidden.clone() if self.residual is None else self.hidden + self.residual
        self.tapped.append(added)


def run_layers(
    layers: Sequence[Layer],
    norm: nn.Module,
    remote: Experts,
    batches: Sequence[MicroBatch],
    tapped: Collection[int] = (),
) -> torch.Tensor:
    """Runs all decoder layers and the final norm.

    While one micro-batch is in attention here, the one before it is on the wire, and the one before
    that is in the FFN (Step-3 report, section 3: three stages). So this side waits for the FFN in
    ``recv`` only. (``begin_step`` may wait for FFN ranks that were lost, and in host form ``send``
    waits for this side's own device.)

    Args:
        tapped: layers whose inputs are kept in the micro-batches; len(layers): the input of the
            final norm.

    Returns:
        hidden states of all micro-batches in order, model dtype [tokens, hidden].
    """
    remote.begin_step(depth=len(batches))
    for layer in layers:
        for batch in batches:
            if batch.in_flight:
                batch.hidden = remote.recv(batch.index)
                batch.in_flight = False
            if layer.index in tapped:
                batch.tap()
            with batch.activate():
                batch.hidden, batch.residual, encoded = layer.attention_half(
                    batch.positions, batch.hidden, batch.residual
                )
                if layer.is_remote:
                    with remote.sending(layer.index, batch.index, len(batch.hidden)):
                        weights, ids = layer.route(batch.hidden)
                        if batch.padding is not None:
                            ids.masked_fill_(batch.padding, -1)  # no routed expert computes them
                        remote.send(layer.index, batch.index, batch.hidden, ids, weights, encoded)
                    batch.in_flight = True
                else:
                    batch.hidden = layer.local_ffn(batch.hidden)
    for batch in batches:
        if batch.in_flight:
            batch.hidden = remote.recv(batch.index)
        if len(layers) in tapped:
            batch.tap()
    outputs = [norm(batch.hidden, batch.residual)[0] for batch in batches]
    remote.end_step()
    # Also copies the output of a single micro-batch. It may be in a receive slot, because the norm
    # works in place, and the next step overwrites that slot.
    return torch.cat(outputs)
