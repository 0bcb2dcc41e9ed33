"""`afd top` and `afd ctl why-slow`: what the members of a running deployment do now."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from afd.control import operator
from afd.control.keys import ClientKeys
from afd.control.local_keys import operator_keys
from afd.errors import AfdError
from afd_launch import straggler
from afd_launch.member_pages import Page, Work, read_pages, works

if TYPE_CHECKING:
    from rich.table import Table

_COLUMNS = (
    "MEMBER", "HOST", "STATE", "STAGE ms", "VS PEERS", "HEADROOM", "BUBBLE", "WIRE ms", "NO CORE",
    "RUNNING", "QUEUE", "KV", "STEP ms", "TOKENS/s",
)  # fmt: skip


def run_top(address: str, keys_file: Path | None, every_s: float, *, once: bool) -> int:
    """Shows the members until Ctrl-C; with ``once`` prints one reading and returns.

    Raises:
        ConfigError, DeadlineExceeded: the control plane cannot be asked.
    """
    from rich.console import Console
    from rich.live import Live

    keys = operator_keys(address, keys_file)
    console = Console()
    if once:
        found, members = observe(address, keys, every_s)
        console.width = max(console.width, 160)  # a pipe is 80 wide, which cuts columns
        console.print(table(found, members))
        return 0
    with Live(console=console, auto_refresh=False, screen=True) as live:
        before: dict[str, Page] = {}
        while True:
            members = _members(address, keys)
            after = read_pages(operator.status(address, keys).members)
            live.update(table(works(before or after, after), members), refresh=True)
            before = after
            time.sleep(every_s)


def run_why_slow(address: str, keys_file: Path | None, over_s: float) -> int:
    """Prints which member is slow, why, and what to do. Returns 0 if none stands out, else 3."""
    found, _ = observe(address, operator_keys(address, keys_file), over_s)
    print(explain(found))
    return 0 if straggler.find(found) is None else 3


def explain(found: Sequence[Work]) -> str:
    """Returns the finding, or which side waits for which if no member stands out.

    Raises:
        AfdError: nothing ran meanwhile.
    """
    busy = [work for work in found if work.stage.count]
    if not busy:
        raise AfdError(
            "no member computed anything meanwhile; send requests, and check that metrics.enabled"
            " is true; steps that a GPU replays also need metrics.stage_every"
        )
    finding = straggler.find(busy)
    if finding is not None:
        return str(finding)
    lines = ["no member stands out from its peers"]
    for role in ("attention", "ffn"):
        side = [work for work in busy if work.role == role]
        if side:
            mean = sum(w.stage.total for w in side) / sum(w.stage.count for w in side)
            waits = sum(w.bubble for w in side) / len(side)
            lines.append(
                f"{role}: {mean * 1e3:.2f} ms per micro-batch; waits for the other side"
                f" {waits:.0%} of a step"
            )
    return "\n".join(lines)


def observe(address: str, keys: ClientKeys, over_s: float) -> tuple[list[Work], list[str]]:
    """Returns what each member did in ``over_s`` seconds, and the ids of all expected members."""
    before = read_pages(operator.status(address, keys).members)
    time.sleep(over_s)
    after = read_pages(operator.status(address, keys).members)
    return works(before, after), _members(address, keys)


def _members(address: str, keys: ClientKeys) -> list[str]:
    found = operator.status(address, keys).members
    return [m.id for m in found if m.role in ("attention", "ffn")]


def table(found: Sequence[Work], members: Sequence[str]) -> Table:
    """One line per member; those without metrics are shown as silent. Colour marks trouble."""
    from rich.table import Table

    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        made.add_column(column, justify="left" if column in _COLUMNS[:3] else "right")
    finding = straggler.find([work for work in found if work.stage.count])
    by_id = {work.member: work for work in found}
    for name in members:
        work = by_id.get(name)
        if work is None:
            made.add_row(name, "", "silent", style="red")
            continue
        blamed = finding is not None and finding.member == name
        made.add_row(*_cells(work, found), style="yellow" if blamed else "")
    made.caption = str(finding).replace("\n", "; ") if finding else "no member stands out"
    made.caption_justify = "left"
    return made


def _cells(work: Work, found: Sequence[Work]) -> list[str]:
    usual = straggler.of_others(work, found, lambda w: w.stage.seconds)
    score = work.stage.seconds / usual if usual else 0.0
    spare = 1 - work.stage.seconds / work.budget_s if work.budget_s else None
    wire = max((mean.seconds for mean in work.wire.values()), default=0.0)
    cells = [
        work.member,
        work.host,
        work.state,
        f"{work.stage.seconds * 1e3:.2f}",
        f"{score:.2f}" if score else "-",
        "-" if spare is None else f"{spare:.0%}",
        f"{work.bubble:.0%}",
        f"{wire * 1e3:.2f}",
        f"{work.waited:.0%}",
    ]
    if work.role == "ffn":
        return [*cells, "", "", "", "", ""]
    return [
        *cells,
        f"{work.running:.0f}",
        f"{work.queue:.0f}",
        f"{work.kv:.0%}",
        f"{work.step_s * 1e3:.1f}",
        f"{work.tokens_per_s:.0f}",
    ]
