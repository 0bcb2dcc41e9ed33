"""Which member makes a deployment slow, and whether processor, accelerator, wire or imbalance is to
blame. Pure functions over what the members did (afd_launch/member_pages.py).

Members of a role do the same work, so each is compared with the median of the others. A member that
stands out is judged in this order:

processor    its threads were ready but waited for a core, much more than the others' threads
imbalance    it got more rows than the others, and its time, or that of its messages, has grown no
             more than its rows
wire         messages from one peer to it take long, with cores and rows like the others'
accelerator  none of these: the same rows take longer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from afd_launch.member_pages import Work

Cause = Literal["processor", "wire", "imbalance", "accelerator"]

SLOWER = 1.25
"""A member is slow from this multiple of the others' median on."""
_WAITED = 0.10  # share of time without a core that slows a member
_MORE_WAITED = 2.0  # multiple of the others' time without a core per time on one
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
    load, usual = worst.work.load, of_others(worst.work, works, lambda w: w.load)
    more = load / usual if usual else float("inf") if load else 0.0
    if more >= _UNEVEN and worst.seconds / worst.usual <= 1.5 * more:
        what = "rows of experts" if worst.work.role == "ffn" else "rows"
        times = f"{more:.1f} times the {what} of its peers" if usual else f"all {what}"
        return _finding(worst, worst.work, "imbalance", f"it computes {times}")
    if worst.peer:
        why = f"messages from {worst.peer} arrive late, though cores and rows are as elsewhere"
        return _finding(worst, worst.work, "wire", why)
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
    for name in (worst.work.member, worst.peer):
        for work in works:
            if work.member != name:
                continue
            usual = of_others(work, works, lambda w: w.waited)
            if work.waited > _WAITED and _odds(work.waited) > _MORE_WAITED * _odds(usual):
                why = (
                    f"its threads were ready but without a core in {work.waited:.0%} of their time"
                    f" (peers: {usual:.0%})"
                )
                return _finding(worst, work, "processor", why)
    return None


def _odds(share: float) -> float:
    """Time without a core over time on one. Unlike the share, it grows without limit."""
    return share / max(1.0 - share, 1e-9)


def _finding(worst: _Suspect, blamed: Work, cause: Cause, why: str) -> Finding:
    where = f"messages from {worst.peer}" if worst.peer else f"stage {worst.work.role}"
    return Finding(blamed.member, where, cause, worst.seconds, worst.usual, why)


def of_others(work: Work, works: Sequence[Work], value: Callable[[Work], float]) -> float:
    """The median over the other members of the role that worked; 0 if there are none."""
    rest = [value(w) for w in works if w.role == work.role and w is not work and w.stage.count]
    return median(rest) if rest else 0.0
