"""The doorbells of many peers at once: one call of the transport, instead of one per slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afd.wire.message import HEADERS
from afd_comm import Region
from ffn_worker.pool.order_format import PARTS
from ffn_worker.pool.peers import Peer


class Doorbells:
    """The slots of these peers, and the flags of their next messages."""

    def __init__(self, peers: Sequence[Peer], first_slots: Sequence[int], max_depth: int) -> None:
        """first_slots: of each peer; its control slot is the last one of ``max_depth`` + 1."""
        self.peers = peers
        self._identity = np.zeros(len(peers), PARTS)
        self._identity["attention"] = [peer.index for peer in peers]
        self._identity["generation"] = [peer.generation for peer in peers]
        self._each = max_depth + 1
        slots = np.zeros((len(peers), self._each), np.uint32)
        slots[:] = np.arange(self._each)
        slots += np.array(first_slots, np.uint32).reshape(-1, 1)
        self._controls = np.ascontiguousarray(slots[:, -1])
        self._slots = np.concatenate([slots.reshape(-1), self._controls])
        # The doorbell of sequence number 1; see afd_comm.make_flag.
        self._first = np.array([(peer.session << 32) + 1 for peer in peers], np.uint64)
        self._headers = np.zeros(len(peers), HEADERS)
        self._words = self._headers.view(np.uint64).reshape(-1, HEADERS.itemsize // 8)

    def awaited(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
        """Returns the slots and flags of every message that may come next.

        A control slot may already show the message after the next; see ``Arrivals``.
        """
        taken = np.array([peer.seq for peer in self.peers], np.uint64)
        flags = taken.reshape(len(self.peers), self._each) + self._first[:, None]
        return self._slots, np.concatenate([flags.reshape(-1), flags[:, -1] + np.uint64(1)])

    def read_controls(
        self, region: Region
    ) -> tuple[Sequence[Peer], npt.NDArray[np.void], npt.NDArray[np.void]]:
        """Returns the messages on control slots that were not taken yet: their senders, their
        headers (:data:`afd.wire.message.HEADERS`; ``seen`` is 1 for the next message and 2 for the
        one after it), and the part of each in an order, if it announces a step."""
        taken = np.array([peer.seq[-1] for peer in self.peers], np.uint64)
        count = region.read_headers(self._controls, self._first + taken, 2, self._words)
        senders, headers, parts = self.peers, self._headers, self._identity
        if not count:
            return [], headers[:0], parts[:0]
        if count < len(self.peers):
            found = np.flatnonzero(headers["seen"])
            senders = [self.peers[i] for i in found.tolist()]
            headers, parts = headers[found], parts[found]
        for name in ("rows", "depth", "moves", "step"):
            parts[name] = headers[name]
        return senders, headers, parts
