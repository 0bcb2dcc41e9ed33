"""Injects faults at random moments under load, and counts what the clients see."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.records import Record
from afd_bench.faults.faults import Fault
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Counts, Traffic

WHOLE_S = 120.0
CALM_S = 3.0
"""Longest wait before a fault, so that its moment is random."""


@dataclass(frozen=True)
class Cell:
    """One fault, once. recovery_s: from the fault until every member is ready and healthy."""

    fault: str
    counts: Counts
    recovery_s: float

    @property
    def line(self) -> str:
        c = self.counts
        text = (
            f"{self.fault}: {c.done} answered, {c.failed} failed, {c.refused} refused, {c.wrong}"
            f" wrong, {c.cut} connections cut, longest pause {c.longest_s:.1f} s, whole after"
            f" {self.recovery_s:.1f} s"
        )
        return "\n".join([text, *(f"    {n} x {why}" for why, n in c.reasons.most_common(5))])


def inject(subject: Subject, traffic: Traffic, fault: Fault, draw: random.Random) -> Cell:
    """Injects one fault under load, and waits for the answers to the requests that it hit.

    Raises:
        AfdError: the deployment does not recover.
    """
    time.sleep(draw.uniform(0.2, CALM_S))
    traffic.read()
    before = subject.newest(fault.renews)
    began = time.monotonic()
    fault.act(subject, draw)
    subject.await_whole(WHOLE_S, fault.renews, before)
    recovery_s = time.monotonic() - began
    traffic.settle()
    counts = traffic.read()
    if not fault.cuts:
        counts.failed += counts.cut
    return Cell(fault.name, counts, recovery_s)


def config_of(model: Path, attention: int = 2, ffn: int = 2) -> dict[str, object]:
    """The deployment, in float32, where tokens do not depend on the batch, with room for one more
    attention instance."""
    return {
        "model": str(model.absolute()),
        "attention": {
            "instances": attention,
            "max_instances": attention + 1,
            "dtype": "float32",
            "max_model_len": 1024,
            "max_num_seqs": 32,
            "max_num_batched_tokens": 128,
            "kv_cache_gib": 0.25,
            "vllm_args": ["--block-size=32"],
        },
        "ffn": {"instances": ffn},
        "pipeline": {"depth": 3, "min_rows": 1},
        "deadlines": {"ffn_s": 120, "drain_s": 60},
        "restart": {"max_restarts": 1000, "standby": True},
    }


def records(
    cells: Sequence[Cell],
    faults: Sequence[Fault],
    shape: str,
    machine: str,
    command: str,
    date: str,
) -> Iterator[Record]:
    """Yields failed and wrong (sums), max_stall_s and recovery_s (maximum) of each fault, beside
    what is wanted. shape: as "2A2F"."""
    for fault in faults:
        own = [cell for cell in cells if cell.fault == fault.name]
        if not own:
            continue
        case = f"{shape}, {fault.name}, {len(own)} times"
        sums = {
            "failed": float(sum(c.counts.failed + c.counts.refused for c in own)),
            "wrong": float(sum(c.counts.wrong for c in own)),
        }
        for metric, value in sums.items():
            yield Record(
                "faults", case, metric, value, "requests", "wanted", 0.0, float(value == 0),
                machine, command, date=date,
            )  # fmt: skip
        worst = {
            "max_stall_s": (max(c.counts.longest_s for c in own), fault.stall_s),
            "recovery_s": (max(c.recovery_s for c in own), 15.0),
        }
        for metric, (seconds, wanted) in worst.items():
            yield Record(
                "faults", case, metric, round(seconds, 2), "s", "wanted", wanted,
                round(wanted / max(seconds, 0.01), 3), machine, command, date=date,
            )  # fmt: skip
