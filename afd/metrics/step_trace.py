"""Stage timestamps: when the stages of a role's last steps ran. Data and bookkeeping only.

A role takes timestamps in the order of its work: after a wait, when a position's work is done, and
when its message has reached the peers. On a CPU a timestamp is the host's clock. On a GPU it is a
stream event that every replay of the graph records again. No stage waits for it; the host reads it
after the step (afd/wire/streams_torch.py).
"""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Protocol

KEPT = 64
"""Number of steps that a role keeps."""


@dataclass(frozen=True)
class Span:
    """Work on one position of a step. Times in ns; ``rows``: rows of this micro-batch.

    started_ns: the wait for its input ended. A GPU may work on several spans at once.
    done_ns: its work ended.
    copied_ns: its message was complete in the peers' slots, including doorbells.
    """

    layer: int
    micro_batch: int
    rows: int
    started_ns: int
    done_ns: int
    copied_ns: int


@dataclass(frozen=True)
class StepTrace:
    """One step of a role; ``spans`` are in the order of their work.

    began_ns: CLOCK_MONOTONIC of the host when it gave the step to its streams. On CPU the other
    times are readings of the same clock. On a GPU they count from ``began_ns`` by the device's
    clock: times of one role are true to each other, those of two GPUs are not (see
    afd_bench/gpu/timeline.py).
    replayed: a GPU ran it as a graph.
    """

    began_ns: int
    ended_ns: int
    replayed: bool
    spans: tuple[Span, ...]

    @property
    def depth(self) -> int:
        return 1 + max(span.micro_batch for span in self.spans)

    @property
    def rows(self) -> int:
        first = self.spans[0].layer
        return sum(span.rows for span in self.spans if span.layer == first)

    @property
    def worked_ns(self) -> tuple[int, ...]:
        """Work time of each span, ns. Time in which spans overlap counts for the earliest one."""
        worked, until = [0] * len(self.spans), 0
        for i in sorted(range(len(self.spans)), key=lambda i: self.spans[i].started_ns):
            span = self.spans[i]
            worked[i] = max(0, span.done_ns - max(span.started_ns, until))
            until = max(until, span.done_ns)
        return tuple(worked)

    @property
    def busy_ns(self) -> int:
        return sum(self.worked_ns)

    @property
    def waited_ns(self) -> int:
        """The bubble: time between spans in which the compute side had no work, ns."""
        began = min(span.started_ns for span in self.spans)
        return max(span.done_ns for span in self.spans) - began - self.busy_ns

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> "StepTrace":
        return cls(**{**data, "spans": tuple(Span(**span) for span in data["spans"])})


class StepTraces:
    """The last ``KEPT`` steps of a role. One thread adds; any thread may read."""

    def __init__(self) -> None:
        self._steps: deque[StepTrace] = deque(maxlen=KEPT)

    def add(self, step: StepTrace) -> None:
        self._steps.append(step)

    def all(self) -> list[StepTrace]:
        return list(self._steps)


class StampSource(Protocol):
    """Takes stamps: the streams of a device (afd/wire/streams_torch.py)."""

    def stamp(self, *, copying: bool = False) -> object: ...

    def elapsed_ns(self, first: object, then: object) -> int: ...


class StageTimestamps(Protocol):
    """Takes the timestamps of one step. Both sides call it while they run or capture the step."""

    def begin(self) -> None: ...

    def working(self) -> None:
        """The compute stream has passed a wait; work follows."""

    def done(self, layer: int, micro_batch: int, rows: int) -> None:
        """The work since :meth:`working` or the last ``done`` belongs to this position."""

    def copied(self) -> None:
        """The message of the last position has reached its peers."""

    def end(self) -> None: ...

    def read(self, began_ns: int, *, replayed: bool) -> StepTrace | None:
        """The step, once it is over; None if it had no position.

        Args:
            began_ns: CLOCK_MONOTONIC of the host, ns, just before the step was given to its
                streams. Device timestamps are counted from here; host timestamps are taken as they
                are.
        """


class NoTimestamps:
    """Takes no timestamps."""

    def begin(self) -> None: ...

    def working(self) -> None: ...

    def done(self, layer: int, micro_batch: int, rows: int) -> None: ...

    def copied(self) -> None: ...

    def end(self) -> None: ...

    def read(self, began_ns: int, *, replayed: bool) -> StepTrace | None:
        return None


class StepTimestamps:
    """Timestamps of one step, or of all replays of one captured step."""

    def __init__(self, stamps: StampSource) -> None:
        self._stamps = stamps
        # Keeps every event alive, including those that no position uses: a graph refers to all of
        # its events, and CUDA's driver crashes when one is destroyed before instantiation.
        self._made: list[object] = []
        self._began: object = None
        self._from: object = None
        self._ended: object = None
        # layer, micro-batch, rows; started, done, copied
        self._positions: list[tuple[tuple[int, int, int], list[object]]] = []

    def _stamp(self, *, copying: bool = False) -> object:
        self._made.append(self._stamps.stamp(copying=copying))
        return self._made[-1]

    def begin(self) -> None:
        self._began = self._from = self._stamp()

    def working(self) -> None:
        self._from = self._stamp()

    def done(self, layer: int, micro_batch: int, rows: int) -> None:
        now = self._stamp()
        self._positions.append(((layer, micro_batch, rows), [self._from, now]))
        self._from = now

    def copied(self) -> None:
        self._positions[-1][1].append(self._stamp(copying=True))

    def end(self) -> None:
        self._ended = self._stamp()

    def read(self, began_ns: int, *, replayed: bool) -> StepTrace | None:
        if not self._positions:
            return None

        def at(stamp: object) -> int:
            if isinstance(stamp, int):  # a reading of the host's clock
                return stamp
            return began_ns + self._stamps.elapsed_ns(self._began, stamp)

        spans = tuple(Span(*where, *map(at, stamps)) for where, stamps in self._positions)
        return StepTrace(began_ns, at(self._ended), replayed, spans)


def new_timestamps(stamps: StampSource, step: int, every: int) -> StageTimestamps:
    """Returns timestamps for every ``every``-th step; with 0 for no step."""
    return StepTimestamps(stamps) if every and step % every == 0 else NoTimestamps()
