"""Which member makes a deployment slow, and whether processor, accelerator, wire or imbalance is to
blame. Pure functions over what the members did (afd_launch/member_pages.py).

Members of a role do the same work, so each is compared with the median of the others. The time that
stands out most, of a stage or of the messages of one link, is its *excess*. It is explained in this
order:

processor    its threads, or those of the sender of late messages, were ready but waited for a core:
             so much longer per row than the others' threads that it makes up the excess
imbalance    the member got more rows than the others, and its time has grown no more than its rows
wire         neither, and messages are late
accelerator  neither, and the same rows take longer

On a host whose cores are all busy every member waits for a core, and late messages are what one
sees first of any fault. So the wait itself proves nothing: only what exceeds the others' wait
counts, and only as far as it is as long as the excess.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isinf
from statistics import median
from typing import Literal

from afd_launch.member_pages import Work

Cause = Literal["processor", "wire", "imbalance", "accelerator"]

SLOWER = 1.25
"""A member is slow from this multiple of the others' median on."""
_WAITED = 0.10  # share of time without a core that slows a member
_EXPLAINS = 0.5  # share of the excess that a longer wait for a core has to make up
_UNEVEN = 1.2  # multiple of the others' rows

_REMEDY: dict[Cause, str] = {
    "processor": "end what else runs on its cores, or give it cores of its own (attention.cpus,"
    " ffn.cpus)",
    "wire": "check this link: `afd doctor` on both hosts, cable, rails, congestion",
    "imbalance": "FFN: `afd ctl rebalance`, or ffn.redundant_experts; attention: requests are"
    " uneven, see the gateway's in-flight counts",
    "accelerator": "check the device: clocks, temperature, other processes on it, and `afd doctor`",
}


@dataclass(frozen=True)
class Finding:
    """The slowest member. where: its stage, or ``from PEER``. seconds, usual: its mean and the
    median of the others. why: the evidence, one sentence."""

    member: str
    where: str
    cause: Cause
    seconds: float
    usual: float
    why: str

    @property
    def remedy(self) -> str:
        return _REMEDY[self.cause]

    def __str__(self) -> str:
        times = f"{self.seconds / self.usual:.1f} times" if self.usual else "slower than"
        return (
            f"{self.member} is slow ({self.where}): {self.seconds * 1e3:.2f} ms per micro-batch,"
            f" {times} its peers ({self.usual * 1e3:.2f} ms)\n"
            f"cause: {self.cause}; {self.why}\n"
            f"remedy: {self.remedy}"
        )


@dataclass(frozen=True)
class _Suspect:
    """A duration that stands out. peer: the sender of its messages; "" for a stage."""

    work: Work
    peer: str
    seconds: float
    usual: float

    @property
    def excess(self) -> float:
        return self.seconds - self.usual


def find(works: Sequence[Work]) -> Finding | None:
    """Returns the member that costs most, or None if no member stands out."""
    suspects = [s for s in _suspects(works) if s.seconds > SLOWER * s.usual]
    if not suspects:
        return None
    worst = max(suspects, key=lambda suspect: suspect.excess)
    starved = _starved(worst, works)
    if starved is not None:
        return starved
    more = _more_rows(worst.work, works)
    if more >= _UNEVEN and worst.seconds / worst.usual <= 1.5 * more:
        what = "rows of experts" if worst.work.role == "ffn" else "rows"
        times = f"all {what}" if isinf(more) else f"{more:.1f} times the {what} of its peers"
        return _finding(worst, worst.work, "imbalance", f"it computes {times}")
    if worst.peer:
        return _late(worst, suspects, works)
    return _finding(
        worst, worst.work, "accelerator", "it has its cores and no more rows than its peers"
    )


def _suspects(works: Sequence[Work]) -> list[_Suspect]:
    found = []
    for work in works:
        usual = of_others(work, works, lambda w: w.stage.seconds)
        if usual:
            found.append(_Suspect(work, "", work.stage.seconds, usual))
        for peer, mean in work.wire.items():
            rest = [
                other.seconds
                for one in works
                if one.role == work.role
                for name, other in one.wire.items()
                if other.count and (one.member, name) != (work.member, peer)
            ]
            if rest and mean.count:
                found.append(_Suspect(work, peer, mean.seconds, median(rest)))
    return found


def _starved(worst: _Suspect, works: Sequence[Work]) -> Finding | None:
    """Blames the processor if the slow member, or the sender of its late messages, lacked cores."""
    found: list[tuple[float, float, Work]] = []
    for work in works:
        if work.member in (worst.work.member, worst.peer) and work.waited > _WAITED:
            # More rows wait longer in all; that alone is no lack of cores.
            rows = _more_rows(work, works)
            if isinf(rows):
                continue
            usual = of_others(work, works, lambda w: w.queued) * max(1.0, rows)
            found.append((work.queued - usual, usual, work))
    if not found:
        return None
    longer, usual, work = max(found, key=lambda one: one[0])
    if longer < _EXPLAINS * worst.excess:
        return None
    why = (
        f"its threads were ready but without a core for {work.queued * 1e3:.2f} ms per micro-batch"
        f" (peers, with as many rows: {usual * 1e3:.2f} ms)"
    )
    return _finding(worst, work, "processor", why)


def _more_rows(work: Work, works: Sequence[Work]) -> float:
    """Rows of a member as a multiple of the others'; inf if only it has some, 1 if nobody has."""
    usual = of_others(work, works, lambda w: w.load)
    if usual:
        return work.load / usual
    return float("inf") if work.load else 1.0


def _late(worst: _Suspect, suspects: Sequence[_Suspect], works: Sequence[Work]) -> Finding:
    """Blames the sender if its messages are late at every receiver, else the receiver."""
    receivers = {work.member for work in works if worst.peer in work.wire}
    late = {suspect.work.member for suspect in suspects if suspect.peer == worst.peer}
    sender = next((work for work in works if work.member == worst.peer), None)
    if sender is not None and len(receivers) > 1 and late == receivers:
        why = "its messages arrive late at every peer, though cores and rows are as elsewhere"
        return _finding(worst, sender, "wire", why)
    why = f"messages from {worst.peer} arrive late, though cores and rows are as elsewhere"
    return _finding(worst, worst.work, "wire", why)


def _finding(worst: _Suspect, blamed: Work, cause: Cause, why: str) -> Finding:
    where = f"messages from {worst.peer}" if worst.peer else f"stage {worst.work.role}"
    return Finding(blamed.member, where, cause, worst.seconds, worst.usual, why)


def of_others(work: Work, works: Sequence[Work], value: Callable[[Work], float]) -> float:
    """The median over the other members of the role that worked; 0 if there are none."""
    rest = [value(w) for w in works if w.role == work.role and w is not work and w.stage.count]
    return median(rest) if rest else 0.0
