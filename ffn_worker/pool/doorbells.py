"""What attention ranks have sent, in arrays: dozens of ranks take little longer than one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afd.topology import SlotMap
from afd.wire.layout import Kind
from afd.wire.message import HEADERS
from afd_comm import Region, make_flag
from ffn_worker.pool.order_format import PARTS, Mix, Parts, word_at

_NEVER = 2**64 - 8
"""A doorbell that nobody rings. Not 0, which an unused slot has."""

_STEP = int(Kind.STEP)  # comparing with an enum takes longer

Mask = npt.NDArray[np.bool_]
"""[attention ranks]"""


class Doorbells:
    """The doorbells that come next, and what came on the control slots; by attention rank.

    requests: uint64 [ranks, micro-batches], the doorbell of the next request in each slot.
    joined: has a session. active: has taken part in a step and not left since.
    announced: has announced a step that has not begun; it runs on streams.
    parts: :data:`PARTS` [ranks], the part of that step in an order.
    shape_words: uint64 [ranks], a view of the rows and depths of ``parts``.
    """

    def __init__(self, slots: SlotMap) -> None:
        ranks, depth = slots.attention_ranks, slots.max_depth
        every = [[slots.to_ffn(i, mb) for mb in range(depth)] for i in range(ranks)]
        self._request_slots = np.array(every, np.uint32).reshape(ranks, depth)
        self._control_slots = np.array([slots.control_to_ffn(i) for i in range(ranks)], np.uint32)
        self.requests = np.full((ranks, depth), _NEVER, np.uint64)
        self._controls = np.full(ranks, _NEVER, np.uint64)
        self.joined, self.active, self.announced = np.zeros((3, ranks), np.bool_)
        self.parts = np.zeros(ranks, PARTS)
        self._headers = np.zeros(ranks, HEADERS)
        self._words = self._headers.view(np.uint64).reshape(ranks, -1)
        self._request_words = np.zeros((ranks * depth, self._words.shape[1]), np.uint64)
        # Views, made once.
        self._seen, self._kinds = self._headers["seen"], self._headers["kind"]
        self._said = [(self.parts[name], self._headers[name]) for name in ("rows", "depth")]
        for field in ("moves", "step"):  # receivers are beside moves
            self._said.append((word_at(self.parts, field), word_at(self._headers, field)))
        self.shape_words = word_at(self.parts, "rows")
        self._mix: Mix | None = None  # of the last step that began

    def begin(self, rank: int, session: int, generation: int) -> None:
        """A session with this rank begins."""
        self.requests[rank] = self._controls[rank] = make_flag(session, 1)
        self.joined[rank], self.active[rank], self.announced[rank] = True, False, False
        self.parts[rank] = (rank, generation, 0, 0, 0, 0, 0)

    def end(self, rank: int) -> None:
        self.requests[rank] = self._controls[rank] = _NEVER
        self.joined[rank] = self.active[rank] = self.announced[rank] = False

    @property
    def any_announced(self) -> bool:
        return bool(np.count_nonzero(self.announced))

    @property
    def all_announced(self) -> bool:
        """Whether every rank with a session has."""
        return bool(np.count_nonzero(self.announced) == np.count_nonzero(self.joined))

    def wait(self, region: Region, ranks: Mask, timeout_us: int) -> bool:
        """Waits until one of these ranks has sent a message that was not taken yet; returns whether
        one has. Without live ranks it returns at once."""
        # A control slot may already show the message after the next.
        at = np.flatnonzero(ranks)
        controls, slots = self._controls[at], self._control_slots[at]
        flags = [self.requests[at].reshape(-1), controls, controls + np.uint64(1)]
        all_slots = np.concatenate([self._request_slots[at].reshape(-1), slots, slots])
        return region.wait_any_of(all_slots, np.concatenate(flags), timeout_us) >= 0

    def requested(self, region: Region, ranks: Mask) -> list[int]:
        """Returns which of these ranks have sent a request that was not taken yet, ascending."""
        flags = self.requests.reshape(-1)
        if not region.read_headers(self._request_slots.reshape(-1), flags, 1, self._request_words):
            return []
        seen = self._request_words[:, 0].reshape(self.requests.shape)
        found: list[int] = np.flatnonzero(seen.any(axis=1) & ranks).tolist()
        return found

    def has_control(self, region: Region, rank: int) -> bool:
        """Whether there is a message on the control slot of this rank that was not taken yet."""
        slot, flag = self._control_slots.item(rank), self._controls.item(rank)
        return region.ready(slot, flag) or region.ready(slot, flag + 1)

    def read_controls(self, region: Region) -> Mask | None:
        """Takes the messages on control slots: leaves and announcements. Returns who has announced
        a step; None: nothing came.

        An announcement may overwrite a leave that was not read yet, so the slot may show the second
        message after the last one taken; then only the second counts. Nothing else is overwritten:
        after an announcement the rank waits for the step, and between two leaves it sends a step,
        whose first request makes us read the first leave.
        """
        if not region.read_headers(self._control_slots, self._controls, 2, self._words):
            return None
        seen = self._seen
        self._controls += seen  # 1 for the next message, 2 for the one after it
        came = seen != 0
        announce: Mask = (self._kinds == _STEP) & came
        np.copyto(self.active, announce, where=came)
        self.announced |= announce
        for field, said in self._said:
            np.copyto(field, said, casting="unsafe", where=announce)
        return announce

    def take_announced(self, rank: int | None = None) -> Parts:
        """Returns the parts of the announced steps, which begin; or only that of one rank."""
        if rank is None:
            parts = Parts.where(self.parts, self.announced, self._mix)
            self._mix = parts.mix
            self.active |= self.announced
            self.announced[:] = False
        else:
            parts = Parts(self.parts[[rank]])
            self.begin_steps([rank])
        return parts

    def begin_steps(self, ranks: Sequence[int] | npt.NDArray[np.uint32]) -> None:
        """The steps that these ranks have announced begin."""
        self.active[ranks] = True
        self.announced[ranks] = False

    def have_announced(self, parts: Parts) -> Mask:
        """Returns for each part whether its rank has announced this step here too."""
        theirs, ranks = parts.table, parts.table["attention"]
        ours = self.parts[ranks]
        same = (ours["step"] == theirs["step"]) & (ours["generation"] == theirs["generation"])
        have: Mask = self.announced[ranks] & same
        return have
