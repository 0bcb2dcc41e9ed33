"""Records and page of `afd bench scale`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afd.config.sections import Deadlines
from afd.records import Record
from afd_bench.scale.deployed import Window
from afd_bench.scale.shared import Case, LeaderTime

LEADER_AIM_US = 100.0


@dataclass(frozen=True)
class Cell:
    """One case. back_s: by role, seconds until a killed member took part again. load: of the
    machine before the start, 1-minute average."""

    case: Case
    start_s: float
    window: Window
    back_s: Mapping[str, float]
    load: float

    @property
    def line(self) -> str:
        back = ", ".join(f"{role} back in {s:.2f} s" for role, s in self.back_s.items())
        w = self.window
        return (
            f"{self.case.name}: per step, leader {w.leader_us:.0f} us (orders {w.orders_us:.0f}),"
            f" waits {w.waits_us:.0f} us, calls {w.answer_us:.0f} us of CPU;"
            f" {w.steps_per_s:.1f} steps/s; started in {self.start_s:.2f} s;"
            f" control plane {w.control_cores:.3f} cores; {back}; load before {self.load:.1f}"
        )


def records(
    cells: Sequence[Cell], announced: Mapping[Case, LeaderTime], host: str, command: str, date: str
) -> list[Record]:
    """announced: the leader's time for steps that all attention instances announce."""
    limits = Deadlines()
    found = [
        (
            f"{case.name} announced",
            [
                ("leader_us_per_step", took.median_us, "us", "aim", LEADER_AIM_US),
                ("leader_p99_us_per_step", took.p99_us, "us", "aim", LEADER_AIM_US),
            ],
        )
        for case, took in announced.items()
    ]
    for cell in cells:
        rows = [
            ("leader_us_per_step", cell.window.leader_us, "us", "aim", LEADER_AIM_US),
            ("start_s", cell.start_s, "s", "deadlines.start_s", limits.start_s),
            ("control_cores", cell.window.control_cores, "cores", "one core", 1.0),
        ]
        rows += [
            (f"{role}_back_s", seconds, "s", "deadlines.ffn_s", limits.ffn_s)
            for role, seconds in cell.back_s.items()
        ]
        found.append((cell.case.name, rows))
    return [
        Record(
            bench="scale",
            case=case,
            metric=metric,
            value=value,
            unit=unit,
            peer=peer,
            peer_value=limit,
            ratio=limit / max(value, 1e-9),
            machine=host,
            command=command,
            date=date,
        )
        for case, rows in found
        for metric, value, unit, peer, limit in rows
    ]


_HEAD = """\
Every instance is a process on one host, without vLLM: real control plane, shared-memory links,
leader, heads and remote experts. A step has 2 layers of depth 1, so 2 expert calls, each of which
the host handles. Each attention instance sends 2 rows per layer and checks every answer.

- *Announced steps* are those of GPUs. CPU time of the leader from the end of a replay to the
  beginning of the next, when all announcements are here: statuses of the step before, membership,
  who takes part, the order to each head, the table of rows, the gate. It contains no wait. No other
  process takes part, so no head has to be woken. The aim is 100 us.
- *Leader*, of the deployments: CPU time of the leader's thread per step for its decisions and its
  orders to the heads. It includes no wait, no expert and no answer. Here the host handles each
  call. All processes share the cores, so the leader's caches are cold, and each of its orders wakes
  a sleeping head: with a core of its own it takes less.
- *Waits*: CPU time inside of its waits: system calls and wake-ups.
- *Load*: of the machine before, 1-minute average. Above the number of cores, others used the caches
  too, and all times are longer than on a quiet machine.
- *Calls*: CPU time of that thread for the rest: reading rows, its experts, the answers.
- *Start*: from the first process to the first step of every attention instance. Processes are forks
  of one that has imported torch.
- *Back*: from the new process of a killed instance to its first step; for an FFN instance, to the
  next step of every attention instance.
- Steps per second depend on the number of cores, which all processes share. They say nothing about
  the speed of a deployment.
"""


def page(
    cells: Sequence[Cell], announced: Mapping[Case, LeaderTime], host: str, command: str, date: str
) -> str:
    lines = [
        "# Scale: many processes on one CPU host",
        "",
        "| case | leader us per step | of it orders | waits us per step | calls us per step"
        " | start s | attention back s | FFN back s | control plane cores | steps/s"
        " | load before |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for cell in cells:
        w, back = cell.window, cell.back_s
        lines.append(
            f"| {cell.case.name} | {w.leader_us:.0f} | {w.orders_us:.0f}"
            f" | {w.waits_us:.0f} | {w.answer_us:.0f} | {cell.start_s:.2f}"
            f" | {_seconds(back, 'attention')} | {_seconds(back, 'ffn')} | {w.control_cores:.3f}"
            f" | {w.steps_per_s:.1f} | {cell.load:.1f} |"
        )
    if announced:
        lines += [
            "",
            "| announced steps | leader us per step | 99th percentile | load |",
            "|---|---|---|---|",
        ]
    lines += [
        f"| {case.name} | {took.median_us:.0f} | {took.p99_us:.0f} | {took.load:.1f} |"
        for case, took in announced.items()
    ]
    lines += ["", f"`{command}`, {host}, {date}.", "", _HEAD]
    return "\n".join(lines)


def _seconds(back: Mapping[str, float], role: str) -> str:
    return f"{back[role]:.2f}" if role in back else "-"
