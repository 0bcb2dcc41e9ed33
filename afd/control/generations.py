"""Numbers of members' lives: each larger than all before it, also after a restart of the server."""

from collections.abc import Callable

MAX_GENERATION = 2**32 - 1  # the upper half of a doorbell flag, see afd_comm.make_flag

# Eighths of seconds since 2025: fine enough that a server restarted at once still counts on from
# larger numbers, coarse enough to fit 32 bits until 2042.
_PER_S = 8
_EPOCH_S = 1_735_689_600


def generation_at(wall_s: float) -> int:
    """The smallest generation that may be given at this time (seconds since 1970); at least 1."""
    return max(1, int((wall_s - _EPOCH_S) * _PER_S))


class Generations:
    """The largest number so far, of whoever gave it."""

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        """wall_clock: seconds since 1970."""
        self._wall_clock = wall_clock
        self._largest = generation_at(wall_clock())

    def saw(self, generation: int) -> None:
        """A number that an earlier run of the server gave."""
        self._largest = max(self._largest, generation)

    def next_after(self, generation: int) -> int:
        """A new number, larger than this one too."""
        at_least = generation_at(self._wall_clock())
        self._largest = max(self._largest + 1, generation + 1, at_least)
        return self._largest
