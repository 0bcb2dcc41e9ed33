"""Experts of an FFN instance that change while it serves (the protocol: afd/control/moves.py)."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace

import torch

from afd.control.client import ControlClient
from afd.control.messages import Members
from afd.control.moves import to_hold
from afd.errors import AfdError
from afd.placement import Table
from afd.resolve import Resolved
from afd.wire.streams_torch import settle
from ffn_worker.loader import load_layer
from ffn_worker.model import FfnModel

logger = logging.getLogger("afd.ffn")


class ExpertMoves:
    """Reads what the control plane wants held in the background, and drops what nobody asks for.

    Args:
        wake: called when a read has ended, from another thread; :meth:`follow` is due then.
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
        self._failed = 0  # number of the move that could not be made
        self._seen = -1

    def follow(self, members: Members) -> bool:
        """Bring the experts in line; the step's thread, between two steps. Whether they are."""
        if self._reader is not None:
            if self._reader.is_alive():
                return False
            self._reader, self._seen = None, -1
        if self._seen == members.version:
            return True
        if self._fault is not None:
            logger.error("cannot read the experts of a move: %s", self._fault)
            self._control.report_move(members.moves - 1, str(self._fault))
            self._failed, self._fault = members.moves, None
        missing = self._missing(members)
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
        """Return when this instance holds all that it is to hold now, before it serves.

        Raises:
            AfdError, OSError: the experts cannot be read.
        """
        while not self.follow(self._control.members):
            if self._reader is not None:
                self._reader.join()
            if self._fault is not None:
                raise self._fault

    def _missing(self, members: Members) -> list[tuple[int, int, Table]]:
        """(layer, bank, experts in our slots) to read. What is not wanted any more is dropped."""
        start, end = self._model.shard.slots
        layers = self._resolved.model.moe_layers
        missing = []
        for layer, banks in to_hold(members, self._resolved.placement, layers).items():
            wanted = {bank: table[start:end] for bank, table in banks.items()}
            held = self._model.held(layer)
            for bank, experts in held.items():
                # An unwanted bank is the only one while its successor is still to be read.
                if wanted.get(bank) != experts and (len(held) > 1 or bank in wanted):
                    self._model.drop(layer, bank)
            held = self._model.held(layer)
            missing += [(layer, b, experts) for b, experts in wanted.items() if b not in held]
        return missing

    def _read(self, layer: int, bank: int, experts: Table) -> None:
        resolved, model = self._resolved, self._model
        shard = replace(model.shard, experts={layer: experts})
        try:
            weights = load_layer(
                resolved.deployment.model, resolved.family, resolved.model, shard, layer
            )
            with torch.inference_mode():
                model.add(layer, bank, experts, weights)
            settle(model.device)
            logger.info("layer %d: read %d experts into bank %d", layer, len(experts), bank)
        except (AfdError, OSError) as error:
            self._fault = error
        self._wake()
