"""Cores that one side of a deployment lends the other while it waits.

In a step of one micro-batch, attention and experts take turns. Where both run on CPUs of one host,
each may then use the cores of both.
"""

import os
from collections.abc import Sequence

# Bound now: a CPU worker of vLLM replaces torch's function by one that does nothing, because the
# threads are bound by then (vllm/v1/worker/cpu_worker.py). Here the mask changes with them.
from torch import set_num_threads


class LentCores:
    """Switches the calling thread, and the compute threads that it starts, between its own cores
    and all of them."""

    def __init__(self, own: Sequence[int] = (), lent: Sequence[int] = ()) -> None:
        """lent: those of the other side; (): none, so :meth:`use` does nothing."""
        self._own = tuple(own)
        self._all = (*own, *lent)
        self._using: tuple[int, ...] = self._own

    @property
    def any(self) -> bool:
        """Whether the other side lends cores."""
        return len(self._all) > len(self._own)

    def use(self, *, lent: bool) -> None:
        wanted = self._all if lent else self._own
        if wanted != self._using:
            self._using = wanted
            os.sched_setaffinity(0, wanted)
            set_num_threads(len(wanted))
