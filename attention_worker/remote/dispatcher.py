"""Addresses the rows of a micro-batch to expert slots, while experts move."""

import threading
from collections.abc import Sequence

import torch

from afd.config.resolve import Resolved
from afd.control.client import ControlClient
from afd.control.moves import followed
from afd.wire.streams_torch import torch_device
from attention_worker.remote.dispatch import DispatchPlan, Splitter
from attention_worker.remote.encoded_batch import EncodedBatch
from attention_worker.remote.expert_slots import ExpertSlotMap


class Dispatcher:
    """Turns expert ids into expert slots and, with routed dispatch, splits the rows.

    Follows the expert placement of the control plane: a change takes effect when the next step
    begins, or at once if no step runs. Reports each move that it has followed.

    Attributes:
        slots: the placement in use. Replayed steps read it too.
        moves: number of the last move in it.
    """

    def __init__(self, resolved: Resolved, number: int, control: ControlClient) -> None:
        """number: of this attention rank."""
        self._control = control
        self.slots = ExpertSlotMap(resolved, number)
        self.moves = 0
        self._splitter = (
            Splitter(
                resolved.placement.bounds,
                resolved.contract.ffn_tp,
                torch_device(resolved.deployment.attention.device),
            )
            if resolved.dispatch == "routed"
            else None
        )
        self._lock = threading.Lock()  # guards self.slots, self.moves and the two fields below
        self._in_step = False
        self._adopted_version = -1  # of the snapshot that self.slots follows

    def start(self) -> None:
        """Begins to follow the control plane."""
        self._control.on_change(lambda _: self._adopt_if_idle())
        self._adopt_if_idle()

    def begin_step(self) -> None:
        """Adopts the latest placement; it stays fixed until :meth:`end_step`."""
        with self._lock:
            self._adopt()
            self._in_step = True

    def end_step(self) -> None:
        with self._lock:
            self._in_step = False
            self._adopt()

    def adopt_in_step(self) -> None:
        """Adopts the latest placement inside a step. The caller sends every unanswered micro-batch
        again."""
        with self._lock:
            self._adopt()

    def dispatch(self, batch: EncodedBatch) -> EncodedBatch:
        """Returns the batch with expert slots in place of expert ids, and with routed dispatch
        ordered by FFN rank."""
        slots = self.slots.of(batch.layer, batch.ids)
        addressed = batch.with_slots(slots)
        if self._splitter is None:
            return addressed
        return addressed.by_rank(self._splitter.split(slots))

    def shares(self, plan: DispatchPlan) -> Sequence[torch.Tensor]:
        """Row numbers of each FFN instance that computes experts, int64 each."""
        shares, used = plan.of_instances(), self.slots.instances
        return shares if len(shares) == len(used) else [shares[j] for j in used]

    def _adopt_if_idle(self) -> None:
        with self._lock:
            if not self._in_step:
                self._adopt()

    def _adopt(self) -> None:
        members = self._control.members
        if members.version != self._adopted_version:
            self._adopted_version = members.version
            self.slots.adopt(members)
            self.moves = followed(members)
            self._control.report_move(self.moves)
