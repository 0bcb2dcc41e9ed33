"""Puts one step of all roles on one clock: busy time of each role, and a trace for Perfetto.

The event times of two GPUs are on different clocks. A message is processed only after it was sent,
so each request gives a lower bound of the clock offset and each answer an upper bound. The bounds
of a step are closest where a message met a waiting peer, so the error of the offset is at most the
fastest round trip (as in NTP, RFC 5905 section 8).
"""

import json
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from afd.control import operator
from afd.errors import AfdError
from afd.metrics.step_trace import Span, StepTrace
from afd_bench.servers import Server
from afd_launch.trace import label, span

Steps = Mapping[str, Sequence[StepTrace]]
"""The last steps of each member, by its id."""


@dataclass(frozen=True)
class Step:
    """One step of an attention instance, and the matching step of each FFN instance.

    offsets_ns, errors_ns: by FFN member, the offset that converts its times to the attention
    instance's clock, and the error bound of that offset.
    """

    attention: StepTrace
    ffn: Mapping[str, StepTrace]
    offsets_ns: Mapping[str, int]
    errors_ns: Mapping[str, int]

    @property
    def seconds(self) -> float:
        return (self.attention.ended_ns - self.attention.began_ns) / 1e9


@dataclass(frozen=True)
class Summary:
    """Means over steps.

    efficiency: busy time of the busiest role / step time. in_layers: the same / the time from the
    role's first to its last work, which excludes the model's work before and after the layers.
    busy: busy time / step time, by member. *_us: stage times of one micro-batch in one layer.
    """

    steps: int
    step_s: float
    efficiency: float
    in_layers: float
    busy: Mapping[str, float]
    attention_us: float
    ffn_us: float
    to_ffn_us: float
    to_attention_us: float


def fetch(server: Server) -> dict[str, list[StepTrace]]:
    """Fetches the last steps of every member. Raises AfdError if a member does not respond."""
    found = {}
    for member in operator.status(server.control).members:
        if member.role not in ("attention", "ffn") or not member.metrics_url:
            continue
        page = member.metrics_url.removesuffix("/metrics") + "/steps"
        try:
            with urllib.request.urlopen(page, timeout=5) as answer:
                found[member.id] = [StepTrace.from_plain(step) for step in json.load(answer)]
        except (OSError, ValueError) as err:
            raise AfdError(
                f"{member.id} does not serve its steps at {page} ({err}); see its log"
            ) from None
    return found


def join(steps: Steps, attention: str, depth: int) -> list[Step]:
    """Joins the steps of one attention instance at this depth with those of the FFN instances.

    Steps match if their hosts began them at about the same time. All hosts' times must be on one
    clock.
    """
    ffn = {member: list(own) for member, own in steps.items() if member.startswith("ffn")}
    found = []
    for mine in steps[attention]:
        if mine.depth != depth:
            continue
        slack = (mine.ended_ns - mine.began_ns) // 2
        theirs = {}
        for member, own in ffn.items():
            near = min(own, key=lambda step: abs(step.began_ns - mine.began_ns), default=None)
            if near is not None and abs(near.began_ns - mine.began_ns) <= slack:
                theirs[member] = near
        if len(theirs) < len(ffn):
            continue
        clocks = {member: clock_offset(mine, step) for member, step in theirs.items()}
        found.append(
            Step(
                mine,
                theirs,
                {member: offset for member, (offset, _) in clocks.items()},
                {member: error for member, (_, error) in clocks.items()},
            )
        )
    return found


def clock_offset(attention: StepTrace, ffn: StepTrace) -> tuple[int, int]:
    """Returns (offset to add to the FFN instance's times, error bound of the offset) in ns."""
    requested = {(s.layer, s.micro_batch): s for s in attention.spans}
    after = _next_of_micro_batch(attention.spans)
    lowest, highest = None, None
    for theirs in ffn.spans:
        place = (theirs.layer, theirs.micro_batch)
        mine = requested.get(place)
        if mine is None:  # rows of another attention instance
            continue
        low = mine.copied_ns - theirs.started_ns
        lowest = low if lowest is None else max(lowest, low)
        if place in after:
            high = after[place].started_ns - theirs.copied_ns
            highest = high if highest is None else min(highest, high)
    if lowest is None or highest is None:
        return 0, 0
    return (lowest + highest) // 2, abs(highest - lowest) // 2


def _next_of_micro_batch(spans: Sequence[Span]) -> dict[tuple[int, int], Span]:
    """Returns for each position the span of the same micro-batch in the next layer."""
    last: dict[int, Span] = {}
    found = {}
    for own in spans:
        if own.micro_batch in last:
            before = last[own.micro_batch]
            found[before.layer, before.micro_batch] = own
        last[own.micro_batch] = own
    return found


def summary(steps: Sequence[Step]) -> Summary:
    """Summarises at least one step."""
    total = sum(step.seconds for step in steps)
    roles = {"attention": [step.attention for step in steps]}
    roles |= {member: [step.ffn[member] for step in steps] for member in steps[0].ffn}
    worked_s = {role: sum(own.busy_ns for own in traces) / 1e9 for role, traces in roles.items()}
    busiest = max(worked_s, key=lambda role: worked_s[role])
    waited_s = sum(own.waited_ns for own in roles[busiest]) / 1e9
    mine = [s for step in steps for s in step.attention.spans]
    theirs = [s for step in steps for own in step.ffn.values() for s in own.spans]
    return Summary(
        len(steps),
        total / len(steps),
        worked_s[busiest] / total,
        worked_s[busiest] / (worked_s[busiest] + waited_s),
        {role: seconds / total for role, seconds in worked_s.items()},
        _mean_us([ns for step in steps for ns in step.attention.worked_ns]),
        _mean_us([ns for step in steps for own in step.ffn.values() for ns in own.worked_ns]),
        _mean_us([s.copied_ns - s.done_ns for s in mine]),
        _mean_us([s.copied_ns - s.done_ns for s in theirs]),
    )


def _mean_us(times_ns: Sequence[int]) -> float:
    return sum(times_ns) / len(times_ns) / 1e3


def chrome(step: Step, attention: str) -> dict[str, Any]:
    """Returns one step of all roles in Chrome's Trace Event Format.

    Each role is a process, with one thread for the work and one for the messages of each
    micro-batch. Times are relative to the begin of the step.
    """
    zero = step.attention.began_ns
    roles = {attention: (step.attention, 0)}
    roles |= {member: (own, step.offsets_ns[member]) for member, own in step.ffn.items()}
    out: list[dict[str, Any]] = []
    for pid, (member, (own, offset)) in enumerate(roles.items(), start=1):
        out.append(label("process_name", pid, 0, member))
        for mb in range(own.depth):
            out.append(label("thread_name", pid, 1 + mb, f"micro-batch {mb}: work"))
            out.append(label("thread_name", pid, 1 + own.depth + mb, f"micro-batch {mb}: messages"))
        shift = offset - zero
        for s in own.spans:
            title, args = f"layer {s.layer} mb {s.micro_batch}", {"rows": s.rows}
            works, sends = 1 + s.micro_batch, 1 + own.depth + s.micro_batch
            out.append(span(title, pid, works, s.started_ns + shift, s.done_ns + shift, args))
            out.append(span(title, pid, sends, s.done_ns + shift, s.copied_ns + shift, {}))
    return {"traceEvents": out, "displayTimeUnit": "ns"}
