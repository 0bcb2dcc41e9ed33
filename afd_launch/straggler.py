"""Which member makes a deployment slow, and whether processor, accelerator, wire or imbalance is to
blame. Pure functions over what the members did (afd_launch/member_pages.py).

Members of a role do the same work, so each is compared with the median of the others. What a member
takes longer than they, seconds per micro-batch, is divided among the causes:

processor    the thread that runs its steps was ready but waited for a core, longer than the others'
imbalance    it got more rows than the others: their time for one row, for these rows
accelerator  the rest of a longer stage
wire         messages are late, beyond what sender and receiver waited for a core

The largest part names the member and the cause. It has to be a quarter of a usual stage, and of
what the others show: small differences cost nothing, and two members never do exactly the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median
from typing import Literal

from afd_launch.member_pages import Work

Cause = Literal["processor", "wire", "imbalance", "accelerator"]

SLOWER = 1.25
"""A member is slow from this multiple of the others' median on."""
_WAITED = 0.10  # share of time without a core that slows a member
_UNEVEN = 1.2  # multiple of the others' rows
_ALSO_LATE = 0.25  # share of a sender's latest messages, for those to another member to be late too

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
    """The slowest member. where: its stage, ``messages from PEER``, or its wait for a core.
    seconds, usual: its mean there and the median of the others. cost: the part of the difference
    that the cause explains. why: the evidence, one sentence."""

    member: str
    where: str
    cause: Cause
    seconds: float
    usual: float
    cost: float
    why: str

    @property
    def remedy(self) -> str:
        return _REMEDY[self.cause]

    def __str__(self) -> str:
        times = f"{self.seconds / self.usual:.1f} times" if self.usual else "longer than"
        return (
            f"{self.member} is slow ({self.where}): {self.seconds * 1e3:.2f} ms per micro-batch,"
            f" {times} its peers ({self.usual * 1e3:.2f} ms)\n"
            f"cause: {self.cause}; {self.why}\n"
            f"remedy: {self.remedy}"
        )


@dataclass(frozen=True)
class _Late:
    """Messages of a sender to a receiver that take longer than those between other members."""

    sender: str
    receiver: Work
    seconds: float
    usual: float

    @property
    def excess(self) -> float:
        return self.seconds - self.usual


def find(works: Sequence[Work]) -> Finding | None:
    """Returns the member that costs most, or None if no member stands out."""
    stages = {
        role: median([w.stage.seconds for w in works if w.role == role and w.stage.count] or [0.0])
        for role in {work.role for work in works}
    }
    roles = {work.member: work.role for work in works}
    found = [
        finding
        for finding in (*_of_members(works), *_of_links(works))
        if finding.seconds > SLOWER * finding.usual
        and finding.cost > (SLOWER - 1) * stages[roles[finding.member]]
    ]
    return max(found, key=lambda finding: finding.cost, default=None)


def _of_members(works: Sequence[Work]) -> Iterator[Finding]:
    for work in works:
        usual = of_others(work, works, lambda w: w.stage.seconds)
        if not usual:
            continue
        excess = max(0.0, work.stage.seconds - usual)
        starved, usually = _starved(work, works)
        if work.waited > _WAITED:
            why = (
                f"the thread of its steps was ready but without a core for"
                f" {work.waited:.0%} of its time"
            )
            where = "waits for a core"
            yield Finding(work.member, where, "processor", work.queued, usually, starved, why)
        more, uneven = _more_rows(work, works), 0.0
        if more >= _UNEVEN:
            uneven = min(excess, usual * (more - 1.0))
            what = "rows of experts" if work.role == "ffn" else "rows"
            times = f"all {what}" if more == inf else f"{more:.1f} times the {what} of its peers"
            yield _slow(work, usual, "imbalance", uneven, f"it computes {times}")
        why = "neither a wait for a core nor more rows than its peers explain it"
        yield _slow(work, usual, "accelerator", excess - uneven - starved, why)


def _slow(work: Work, usual: float, cause: Cause, cost: float, why: str) -> Finding:
    where = f"stage {work.role}"
    return Finding(work.member, where, cause, work.stage.seconds, usual, cost, why)


def _of_links(works: Sequence[Work]) -> Iterator[Finding]:
    by_name = {work.member: work for work in works}
    late = list(_late(works))
    for one in late:
        cost, sender = one.excess - _starved(one.receiver, works)[0], by_name.get(one.sender)
        if sender is not None:
            cost -= _starved(sender, works)[0]
        receivers = {work.member for work in works if one.sender in work.wire}
        also = {
            other.receiver.member
            for other in late
            if other.sender == one.sender and other.excess > _ALSO_LATE * one.excess
        }
        blamed, where = one.receiver, f"messages from {one.sender}"
        why = f"{where} arrive late, though cores and rows are as elsewhere"
        if sender is not None and len(receivers) > 1 and also == receivers:
            blamed, where = sender, f"messages to {one.receiver.member}"
            why = "its messages arrive late at every peer, though cores and rows are as elsewhere"
        yield Finding(blamed.member, where, "wire", one.seconds, one.usual, cost, why)


def _late(works: Sequence[Work]) -> Iterator[_Late]:
    for work in works:
        for sender, mean in work.wire.items():
            rest = [
                other.seconds
                for one in works
                if one.role == work.role
                for name, other in one.wire.items()
                if other.count and (one.member, name) != (work.member, sender)
            ]
            if rest and mean.count and mean.seconds > median(rest):
                yield _Late(sender, work, mean.seconds, median(rest))


def _starved(work: Work, works: Sequence[Work]) -> tuple[float, float]:
    """Returns how much longer per micro-batch its thread waited for a core than usual, and the
    usual time."""
    usual = of_others(work, works, lambda w: w.queued)
    stage = of_others(work, works, lambda w: w.stage.seconds)
    # More rows wait longer in all, as far as they also take longer; that alone is no lack of cores.
    longer = min(_more_rows(work, works), work.stage.seconds / stage) if stage else 1.0
    usual *= max(1.0, longer)
    return max(0.0, work.queued - usual), usual


def _more_rows(work: Work, works: Sequence[Work]) -> float:
    """Rows of a member as a multiple of the others'; inf if only it has some, 1 if nobody has."""
    usual = of_others(work, works, lambda w: w.load)
    if usual:
        return work.load / usual
    return inf if work.load else 1.0


def of_others(work: Work, works: Sequence[Work], value: Callable[[Work], float]) -> float:
    """The median over the other members of the role that worked; 0 if there are none."""
    rest = [value(w) for w in works if w.role == work.role and w is not work and w.stage.count]
    return median(rest) if rest else 0.0
