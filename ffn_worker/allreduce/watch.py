"""Watches whether the processes of the other ranks still run."""

import os
import select

from torch.distributed import Store

from afd.errors import PeerLost


class PeerWatch:
    """Watches the other ranks, on the same host, through process descriptors (pidfd).

    A descriptor stays valid if another process gets the same number later.

    Args:
        store: where the ranks exchange their process numbers. Blocks up to the store's timeout.

    Raises:
        PeerLost: a rank's process has ended or cannot be seen.
    """

    def __init__(self, store: Store, rank: int, world: int) -> None:
        store.set(f"process/{rank}", str(os.getpid()))
        others = [r for r in range(world) if r != rank]
        self._ranks: dict[int, int] = {}
        for other in others:
            process = int(store.get(f"process/{other}"))
            try:
                self._ranks[os.pidfd_open(process)] = other
            except OSError as err:
                self.close()
                raise PeerLost(
                    f"process {process} of rank {other} cannot be watched ({err.strerror}); it "
                    "ended, or the ranks do not share a PID namespace"
                ) from err

    def lost(self) -> int | None:
        """Returns a rank whose process has ended, None while all run."""
        poll = select.poll()
        for descriptor in self._ranks:
            poll.register(descriptor, select.POLLIN)
        ended = poll.poll(0)
        return self._ranks[ended[0][0]] if ended else None

    def close(self) -> None:
        for descriptor in self._ranks:
            os.close(descriptor)
        self._ranks = {}
