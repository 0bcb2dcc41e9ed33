"""Derives stage times from message timestamps, by the simulator's rules. Pure.

The stage times are those with which the rules of docs/simulator.md reproduce the moments at which
the messages of a step were posted. A position is a (layer, micro-batch) pair.

- The attention stage of a position begins when the previous position is posted and all answers to
  the same micro-batch of the previous layer have arrived. It ends when its rows are posted.
- The FFN stage of a position begins when the rows of all attention instances have arrived and the
  answer to the previous position is posted. It ends when its answer is posted.
- The time between a step's last answer and the next step's first post is the rest of the step plus
  one attention stage, which is assumed to take as long as in the other layers.

Wake-up and posting times are therefore part of the following stage. All times must be on one clock,
so the roles must run on one host.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from afd.wire.message import TraceEvent

Pages = Mapping[str, Mapping[str, Sequence[TraceEvent]]]
"""Traces of all roles: member id -> peer -> messages received from that peer."""
Samples = dict[int, list[float]]
"""Observed times in microseconds, by number of rows or bytes."""

_COPIES_NS = 5_000_000
"""Upper bound of the time in which one micro-batch is posted to all FFN instances."""


@dataclass(frozen=True)
class Exchange:
    """One micro-batch sent to one FFN instance, and its answer. Times in ns.

    posted, arrived: when the request was posted and received. answered, returned: when the answer
    was posted and received.
    """

    layer: int
    micro_batch: int
    rows: int
    posted: int
    arrived: int
    answered: int
    returned: int

    @property
    def key(self) -> tuple[int, int]:
        return self.layer, self.micro_batch


Step = tuple[Exchange, ...]
"""One step of one attention instance: its positions in order. With several FFN instances,
``returned`` is the arrival of the last answer."""


@dataclass
class Times:
    """Observed stage times.

    attention: by rows of the micro-batch. ffn: by rows of the micro-batch summed over all attention
    instances. rest: by rows of the step. wire: by bytes of the message.
    """

    attention: Samples = field(default_factory=lambda: defaultdict(list))
    ffn: Samples = field(default_factory=lambda: defaultdict(list))
    rest: Samples = field(default_factory=lambda: defaultdict(list))
    wire: Samples = field(default_factory=lambda: defaultdict(list))


def times_of(
    pages: Pages, begin: int, end: int, rows: int | None = None, active: int | None = None
) -> Times:
    """Returns the stage times of steps whose first post lies in [begin, end), ns, CLOCK_MONOTONIC.

    rows: only steps with this many rows per attention instance. active: only steps in which this
    many attention instances had rows. None: all steps.
    """
    members = sorted(name for name in pages if name.startswith("attention-"))
    ffns = sorted(name for name in pages if name.startswith("ffn-"))
    out = Times()
    exchanged = {
        member: {ffn: exchanges(pages[ffn][member], pages[member][ffn]) for ffn in ffns}
        for member in members
    }
    calls = {ffn: calls_of([exchanged[member][ffn] for member in members]) for ffn in ffns}
    together = {
        (index, exchange.posted): len(call)
        for some in calls.values()
        for call in some
        for index, exchange in call
    }
    spans: list[list[tuple[int, int]]] = [[] for _ in members]  # of the selected steps
    for index, member in enumerate(members):
        of_ffns = exchanged[member]
        steps = steps_of(list(of_ffns.values()))
        before: Step | None = None
        for number, step in enumerate(steps):
            selected = begin <= step[0].posted < end and rows in (None, rows_of(step))
            if active is not None:
                selected &= active == max(together.get((index, e.posted), 0) for e in step)
            if selected:
                until = step[-1].posted + _COPIES_NS
                if number + 1 < len(steps):
                    until = min(until, steps[number + 1][0].posted)
                spans[index].append((step[0].posted, until))
                _observe(step, before, out)
            before = step if selected else None
        for ffn in ffns:
            for events in (pages[ffn][member], pages[member][ffn]):
                for posted, _, arrived, _, layer, _, _, nbytes in events:
                    if layer >= 0 and _inside(spans[index], posted):
                        out.wire[nbytes].append((arrived - posted) / 1e3)
    for some in calls.values():
        _observe_ffn(some, spans, out)
    return out


def exchanges(requests: Sequence[TraceEvent], answers: Sequence[TraceEvent]) -> list[Exchange]:
    """Pairs the requests of one attention instance to one FFN instance with their answers.

    Returns the pairs in the order of posting; drops messages without a counterpart.
    """
    requested: dict[tuple[int, int], list[TraceEvent]] = defaultdict(list)
    for event in requests:
        requested[event[4], event[5]].append(event)
    found = []
    for answered, _, returned, _, layer, micro_batch, _, _ in answers:
        same = requested[layer, micro_batch]
        at = bisect_right(same, answered, key=lambda event: event[2]) - 1
        if layer >= 0 and at >= 0:
            posted, _, arrived, _, _, _, rows, _ = same[at]
            found.append(Exchange(layer, micro_batch, rows, posted, arrived, answered, returned))
    return sorted(found, key=lambda exchange: exchange.posted)


def steps_of(copies: Sequence[Sequence[Exchange]]) -> list[Step]:
    """Returns the complete steps of one attention instance. copies: exchanges per FFN instance."""
    merged = _merged(copies)
    layers = sorted({exchange.layer for exchange in merged})
    groups: list[list[Exchange]] = []
    for exchange in merged:
        if not groups or exchange.key <= groups[-1][-1].key:
            groups.append([])
        groups[-1].append(exchange)
    return [
        tuple(group)
        for group in groups
        if [e.key for e in group]
        == [(layer, mb) for layer in layers for mb in range(_depth(group))]
    ]


def rows_of(step: Step) -> int:
    """Returns the rows of all micro-batches of a step."""
    return sum(exchange.rows for exchange in step[: _depth(step)])


def _depth(step: Sequence[Exchange]) -> int:
    return sum(exchange.layer == step[0].layer for exchange in step)


def _merged(copies: Sequence[Sequence[Exchange]]) -> list[Exchange]:
    """Merges the exchanges of one micro-batch with several FFN instances into one."""
    if len(copies) == 1:
        return list(copies[0])
    open_: dict[tuple[int, int], list[Exchange]] = defaultdict(list)
    out = []
    for exchange in sorted((e for some in copies for e in some), key=lambda e: e.posted):
        here = open_[exchange.key]
        if here and exchange.posted - here[0].posted > _COPIES_NS:
            here.clear()  # a copy is missing
        here.append(exchange)
        if len(here) == len(copies):
            last = max(copy.returned for copy in here)
            first = here[0]
            out.append(
                Exchange(*first.key, first.rows, first.posted, first.arrived, first.answered, last)
            )
            here.clear()
    return sorted(out, key=lambda e: e.posted)


def _inside(spans: Sequence[tuple[int, int]], moment: int) -> bool:
    """Returns whether a moment lies in one of the spans, which must be sorted."""
    at = bisect_right(spans, moment, key=lambda span: span[0]) - 1
    return at >= 0 and moment < spans[at][1]


def _observe(step: Step, before: Step | None, out: Times) -> None:
    """Adds the attention times of a step, and the rest of the step directly before it."""
    depth = _depth(step)
    first: list[float] = []  # micro-batch 0
    for index, exchange in enumerate(step[1:], start=1):
        ready = step[index - 1].posted
        if index >= depth:
            ready = max(ready, step[index - depth].returned)
        took = (exchange.posted - ready) / 1e3
        out.attention[exchange.rows].append(took)
        if exchange.micro_batch == 0:
            first.append(took)
    if before is not None and first:
        gap = (step[0].posted - max(exchange.returned for exchange in before)) / 1e3
        out.rest[rows_of(before)].append(max(0.0, gap - sum(first) / len(first)))


Call = list[tuple[int, Exchange]]
"""One call of an FFN instance: attention instances by index, and what each exchanged."""


def calls_of(lists: Sequence[Sequence[Exchange]]) -> list[Call]:
    """Returns the calls of an FFN instance. lists: its exchanges, per attention instance."""
    merged = [(member, exchange) for member, some in enumerate(lists) for exchange in some]
    calls: list[Call] = []
    members: set[int] = set()  # of the last call
    for member, exchange in sorted(merged, key=lambda item: item[1].answered):
        if not calls or calls[-1][0][1].key != exchange.key or member in members:
            calls.append([])
            members = set()
        calls[-1].append((member, exchange))
        members.add(member)
    return calls


def _observe_ffn(
    calls: Sequence[Call], spans: Sequence[Sequence[tuple[int, int]]], out: Times
) -> None:
    """Adds the times of an FFN instance. spans: of the selected steps of each attention
    instance."""
    for before, call in pairwise(calls):
        if all(_inside(spans[member], exchange.posted) for member, exchange in call):
            ready = max(before[0][1].answered, *(exchange.arrived for _, exchange in call))
            rows = sum(exchange.rows for _, exchange in call)
            out.ffn[rows].append((call[0][1].answered - ready) / 1e3)
