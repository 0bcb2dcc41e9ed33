"""When the stages of a step ran: what a role keeps of its last steps. Pure data and bookkeeping.

A role marks moments in the order of its work: past a wait, a position's work done, its message
with the peers. On CPU a moment is the host's clock. On a GPU it is an event of a stream, recorded
by each replay of the graph that holds it, so nothing waits for it and the host reads it when the
step is over (afd/wire/streams_torch.py).
"""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Protocol

KEPT = 64
"""Steps that a role keeps."""


@dataclass(frozen=True)
class Span:
    """Work on one position of a step. Times: ns; rows: of this micro-batch.

    started_ns: past the wait for its input; a GPU may work on several spans at once. copied_ns: its
    message was complete in the peers' slots, doorbells included.
    """

    layer: int
    micro_batch: int
    rows: int
    started_ns: int
    done_ns: int
    copied_ns: int


@dataclass(frozen=True)
class StepTrace:
    """One step of a role, its spans in the order of their work.

    began_ns: CLOCK_MONOTONIC of the host when it gave the step to its streams. The other times are
    by the clock that the work is timed by, which starts at the same number: times of one role are
    true to each other, those of two GPUs are not (see afd/bench/gpu/timeline.py).
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
        """Per span, the time that it added to the step's work: while several are worked on at once,
        the time counts for the one that began first."""
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
        """Between spans: the compute side had nothing to do."""
        began = min(span.started_ns for span in self.spans)
        return max(span.done_ns for span in self.spans) - began - self.busy_ns

    def plain(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> "StepTrace":
        return cls(**{**data, "spans": tuple(Span(**span) for span in data["spans"])})


class StepTraces:
    """The last steps of a role. One writer; safe to read from another thread."""

    def __init__(self) -> None:
        self._steps: deque[StepTrace] = deque(maxlen=KEPT)

    def add(self, step: StepTrace) -> None:
        self._steps.append(step)

    def all(self) -> list[StepTrace]:
        return list(self._steps)


class Stamps(Protocol):
    """A source of moments: host or device streams (afd/wire/streams_torch.py)."""

    def stamp(self, *, copying: bool = False) -> object: ...

    def elapsed_ns(self, first: object, then: object) -> int: ...


class Marks(Protocol):
    """What the loops of both sides say of a step while they run or record it."""

    def begin(self) -> None: ...

    def working(self) -> None:
        """The computing stream is past a wait; what it gets from now on is work."""

    def done(self, layer: int, micro_batch: int, rows: int) -> None:
        """The work since :meth:`working`, or since the last ``done``, was on this position."""

    def copied(self) -> None:
        """The last position's message is with its peers."""

    def end(self) -> None: ...

    def read(self, began_ns: int, *, replayed: bool) -> StepTrace | None:
        """The step, once it is over; None if it had no position."""


class NoMarks:
    """Notes nothing."""

    def begin(self) -> None: ...

    def working(self) -> None: ...

    def done(self, layer: int, micro_batch: int, rows: int) -> None: ...

    def copied(self) -> None: ...

    def end(self) -> None: ...

    def read(self, began_ns: int, *, replayed: bool) -> StepTrace | None:
        return None


class StepMarks:
    """Marks of one step, or of all replays of one captured step."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps
        # A graph refers to all of its events, and instantiating it after one of them has been
        # destroyed crashes CUDA's driver; so also those that no position needs are kept.
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
            return began_ns + self._stamps.elapsed_ns(self._began, stamp)

        spans = tuple(Span(*where, *map(at, stamps)) for where, stamps in self._positions)
        return StepTrace(began_ns, at(self._ended), replayed, spans)


def new_marks(stamps: Stamps, step: int, every: int) -> Marks:
    """Marks for every ``every``-th step; 0: for none."""
    return StepMarks(stamps) if every and step % every == 0 else NoMarks()
