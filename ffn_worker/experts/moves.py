"""Moves experts to and from an FFN rank while it serves (protocol: afd/control/moves.py)."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from afd.config.resolve import Resolved
from afd.control.client import ControlClient
from afd.control.messages import Members
from afd.control.moves import completed, to_hold
from afd.errors import AfdError, PeerLost
from afd.placement.tables import EMPTY, Table
from afd.wire.streams_torch import synchronize
from ffn_worker.experts.loader import Checkpoint, load_layer
from ffn_worker.experts.model import FfnModel

logger = logging.getLogger("afd.ffn")

_PAUSE_S = 0.002


class ExpertMoves:
    """Reads the experts that the control plane wants here, in the background; drops unwanted ones.

    Args:
        wake: called from another thread when a read has ended; call :meth:`follow` then.

    Attributes:
        settled: number of the last move that is complete here: nobody uses older slots, and the
            experts are where captured graphs read them.
    """

    def __init__(
        self,
        resolved: Resolved,
        model: FfnModel,
        control: ControlClient,
        wake: Callable[[], object],
    ) -> None:
        self._resolved = resolved
        self._model = model
        self._control = control
        self._wake = wake
        self._reader: threading.Thread | None = None
        self._fault: AfdError | OSError | None = None
        self._failed = 0  # number of the move whose experts could not be read
        self._seen = -1
        self.settled = 0

    def follow(self, members: Members) -> bool:
        """Follows the membership; on the loop's thread, between two steps. Returns whether the
        experts are as the control plane wants them."""
        if self._reader is not None:
            if self._reader.is_alive():
                return False
            self._reader, self._seen = None, -1
        if self._seen == members.version:
            return True
        if self._fault is not None:
            logger.error("cannot read the experts to move: %s", self._fault)
            self._control.report_move(members.moves - 1, str(self._fault))
            self._failed, self._fault = members.moves, None
        missing = self._missing(members)
        self.settled = completed(members)
        if missing and members.moves != self._failed:
            self._reader = threading.Thread(
                target=self._read, args=missing[0], name="afd-experts", daemon=True
            )
            self._reader.start()
            return False
        self._seen = members.version
        if not missing:
            self._control.report_move(members.moves)
        return not missing

    def catch_up(self) -> None:
        """Returns once this rank holds all experts that it has to hold before it serves.

        Raises:
            AfdError, OSError: the experts cannot be read.
        """
        while not self.follow(self._control.members):
            if self._reader is not None:
                self._reader.join()
            if self._fault is not None:
                raise self._fault

    def warm_up(self) -> None:
        """Reads into the other bank of one layer once, and drops it. Call it before the first step.

        So the first move loads no kernel and allocates no memory. In a step, a driver may be unable
        to: it waits for an idle device, and the streams of a step wait for messages.

        Raises:
            AfdError, OSError: the experts cannot be read.
        """
        layer = self._resolved.model.moe_layers[0]
        ((bank, experts),) = self._model.banks.held(layer).items()
        try:
            for first in (0, EMPTY):
                self._load(layer, 1 - bank, (first,) + (EMPTY,) * (len(experts) - 1))
                self._model.banks.drop(layer, 1 - bank)
        except torch.OutOfMemoryError:
            logger.warning("no device memory is left for experts that move: they cannot")

    def settle(self, number: int) -> None:
        """Returns once the move of this number is complete here, as it is for the leader.

        Raises:
            PeerLost: this rank does not learn of it in ``deadlines.ffn_s``.
        """
        deadline = time.monotonic() + self._resolved.deployment.deadlines.ffn_s
        while self.settled < number:
            if time.monotonic() > deadline:
                raise PeerLost(
                    f"expert move {number} is complete for the leader and not for this rank;"
                    " restarting with the experts that the control plane names"
                )
            time.sleep(_PAUSE_S)
            self.follow(self._control.members)

    def check_held(self, layer: int, ids: torch.Tensor) -> None:
        """Raises PeerLost if rows need experts that are not here: their results would be zero.

        The protocol of moves rules this out unless the control plane loses state. Checked on device
        cpu only, because the check waits for the device.
        """
        if ids.device.type == "cpu" and not self._model.banks.holds(layer, ids):
            raise PeerLost(
                f"rows of layer {layer} need experts that a move has taken from this rank or not"
                " brought yet; restarting with the experts that the control plane names"
            )

    def _missing(self, members: Members) -> list[tuple[int, int, Table]]:
        """Drops unwanted experts; returns (layer, bank, experts in our slots) still to read."""
        start, end = self._model.shard.slots
        layers = self._resolved.model.moe_layers
        missing = []
        for layer, banks in to_hold(members, self._resolved.placement, layers).items():
            wanted = {bank: table[start:end] for bank, table in banks.items()}
            held = self._drop_unwanted(layer, wanted)
            missing += [(layer, b, experts) for b, experts in wanted.items() if b not in held]
        return missing

    def _drop_unwanted(self, layer: int, wanted: Mapping[int, Table]) -> dict[int, Table]:
        """Drops banks that are not wanted; returns those held. The last bank stays until its
        successor has been read.

        Raises:
            PeerLost: the last bank itself is wanted with other experts.
        """
        while True:
            held = self._model.banks.held(layer)
            unwanted = [bank for bank, experts in held.items() if wanted.get(bank) != experts]
            if len(held) > 1 and unwanted:
                self._model.banks.drop(layer, unwanted[0])
                continue
            if unwanted and unwanted[0] in wanted:
                raise PeerLost(
                    f"the control plane names other experts for bank {unwanted[0]} of layer"
                    f" {layer}; restarting with the experts that it names"
                )
            return held

    def _read(self, layer: int, bank: int, experts: Table) -> None:
        try:
            self._load(layer, bank, experts)
            count = len(experts) - experts.count(EMPTY)
            logger.info("layer %d: read %d experts into bank %d", layer, count, bank)
        except (AfdError, OSError) as error:
            self._fault = error
        self._wake()

    def _load(self, layer: int, bank: int, experts: Table) -> None:
        resolved, model = self._resolved, self._model
        shard = replace(model.shard, experts={layer: experts})
        checkpoint = Checkpoint(resolved.deployment.model, resolved.family, resolved.model)
        with model.banks.aside():
            weights = load_layer(checkpoint, shard, layer, model.banks.scheme, model.device)
            with torch.inference_mode():
                model.banks.add(layer, bank, experts, weights)
            synchronize(model.device)
