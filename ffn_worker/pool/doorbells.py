"""The doorbells of many peers at once: one call of the transport, instead of one per slot."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from afd.wire.message import HEADERS
from afd_comm import Region
from ffn_worker.pool.peers import Peer

_FIELDS = ("seen", "kind", "depth", "moves", "step", "rows")


Control = tuple[Peer, int, int, int, int, int, int]
"""Sender, number of the message (1: the next one; 2: the one after it), and of its header kind,
depth, moves, step and rows."""


class Doorbells:
    """The slots of these peers, and the flags of their next messages."""

    def __init__(self, peers: Sequence[Peer], first_slots: Sequence[int], max_depth: int) -> None:
        """first_slots: of each peer; its control slot is the last one of ``max_depth`` + 1."""
        self.peers = peers
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

    def read_controls(self, region: Region) -> list[Control]:
        """Returns the messages on control slots that were not taken yet."""
        taken = np.array([peer.seq[-1] for peer in self.peers], np.uint64)
        count = region.read_headers(self._controls, self._first + taken, 2, self._words)
        if not count:
            return []
        if count == len(self.peers):
            senders, headers = self.peers, self._headers
        else:
            found = np.flatnonzero(self._headers["seen"])
            senders, headers = [self.peers[i] for i in found.tolist()], self._headers[found]
        return list(zip(senders, *(headers[name].tolist() for name in _FIELDS), strict=True))
