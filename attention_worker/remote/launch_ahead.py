"""Lets the host queue work of a GPU behind answers that have not come yet.

In steps without a graph, the host takes longer to queue an attention half than the GPU takes to run
it. So it does not wait for the answers first: the stream does. The host waits in another thread,
which also recovers lost FFN ranks, while the next attention half is queued.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from afd.wire.streams_torch import Streams
from afd_comm import Region


class LaunchAhead:
    """Waits for the answers to one micro-batch at a time.

    Only for links that run alone (:func:`attention_worker.remote.sessions.run_alone`): the thread
    that queues may sit in a call of the driver until the stream has gone on.
    """

    def __init__(self, region: Region, streams: Streams, enter: Callable[[], None]) -> None:
        """enter: gives the calling thread the device and a stream of its own."""
        self._region = region
        self._streams = streams
        self._running: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers", initializer=enter)
        self._thread.submit(int).result()  # the stream: a driver may make none while one waits

    def wait(
        self, slots: list[int], doorbells: list[int], answered: Callable[[], list[int]]
    ) -> None:
        """Makes the stream wait for these doorbells. What the caller queues next runs behind it.

        Args:
            answered: waits on the host for the same answers, and returns the doorbells that they
                rang: others than ``doorbells`` if a session had to be renewed. Called in another
                thread with a stream of its own. Until :meth:`settle` returns, it has what it uses
                for itself.
        """
        self._running = self._thread.submit(self._follow, slots, doorbells, answered)
        self._streams.wait_for(self._region, slots, doorbells)

    def settle(self) -> None:
        """Returns once the answers are here. Raises what ``answered`` raised."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _follow(
        self, slots: list[int], doorbells: list[int], answered: Callable[[], list[int]]
    ) -> None:
        rung: list[int] = []
        try:
            with torch.inference_mode():
                rung = answered()
        finally:
            if rung != doorbells:  # nobody else rings them, and the stream has to go on
                self._region.ring(slots, doorbells)
