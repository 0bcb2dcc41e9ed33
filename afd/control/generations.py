"""Generations: every registration gets a larger number, also after a restart of the server."""

from collections.abc import Callable

MAX_GENERATION = 2**32 - 1  # the upper half of a doorbell flag, see afd_comm.make_flag

# Eighths of seconds since 2025: a restarted server still starts at a larger number, and 32 bits
# last until 2042.
_PER_S = 8
_EPOCH_S = 1_735_689_600


def generation_at(wall_s: float) -> int:
    """Returns the smallest generation to assign at this time (seconds since 1970); at least 1."""
    return max(1, int((wall_s - _EPOCH_S) * _PER_S))


class Generations:
    """The largest generation so far, and the next one."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """wall_clock: seconds since 1970."""
        self._wall_clock = wall_clock
        self._largest = generation_at(wall_clock())

    def saw(self, generation: int) -> None:
        """Notes a generation that this or an earlier run of the server assigned."""
        self._largest = max(self._largest, generation)

    def next_after(self, generation: int) -> int:
        """Returns what :meth:`saw` may be told next: larger than this one and all before."""
        return max(self._largest + 1, generation + 1, generation_at(self._wall_clock()))
