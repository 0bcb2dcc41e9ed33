"""Where the rows of a micro-batch go, while experts move."""

import threading

from afd.control.client import ControlClient
from afd.control.moves import followed
from afd.resolve import Resolved
from attention_worker.dispatch import ExpertSlots, Splitter
from attention_worker.outgoing import Outgoing


class Placing:
    """Follows where the control plane says that experts are: from the next step on, and at once
    while there is none. Tells the control plane which of its moves it has followed."""

    def __init__(self, resolved: Resolved, index: int, control: ControlClient) -> None:
        """index: of this attention instance."""
        self._control = control
        self._slots = ExpertSlots(resolved, index)
        self._splitter = (
            Splitter(
                resolved.placement.bounds,
                resolved.contract.ffn_tp,
                resolved.deployment.attention.device,
            )
            if resolved.dispatch == "routed"
            else None
        )
        self._lock = threading.Lock()  # guards self._slots and the next two
        self._in_step = False
        self._seen = -1  # version of the snapshot that self._slots are of

    def start(self) -> None:
        """Follow from now on."""
        self._control.on_change(lambda _: self._idle())
        self._idle()

    def begin_step(self) -> None:
        with self._lock:
            self._adopt()
            self._in_step = True

    def end_step(self) -> None:
        with self._lock:
            self._in_step = False
            self._adopt()

    def begin_anew(self) -> None:
        """All that is unanswered goes out once more: experts may be found anew in mid-step."""
        with self._lock:
            self._adopt()

    def placed(self, source: Outgoing) -> Outgoing:
        """Rows as they go out: experts' ids are slots, and each FFN instance's rows are together
        where it does not get all of them."""
        slots = self._slots.of(source.layer, source.ids)
        placed = source.placed(slots)
        return placed if self._splitter is None else placed.dealt(self._splitter.split(slots))

    def _idle(self) -> None:
        with self._lock:
            if not self._in_step:
                self._adopt()

    def _adopt(self) -> None:
        members = self._control.members
        if members.version != self._seen:
            self._seen = members.version
            self._slots.adopt(members)
            self._control.report_move(followed(members))
