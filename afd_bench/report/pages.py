"""What every result page says of its records: the spread of the ratios and the lost cells."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from afd.records import Record
from afd_bench.report.sources import Checkout

BEGIN, END = "<!-- records: begin -->", "<!-- records: end -->"

MOST_LOST = 60
"""Lost cells that a page lists; all of them are in the record file."""


def section(name: str, records: Sequence[Record]) -> str:
    """Markdown: one line per benchmark, metric and peer, then every cell whose ratio is below 1."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.bench, record.metric, record.peer), []).append(record)
    lines = [
        BEGIN,
        "## Records",
        "",
        f"Rendered from [{name}]({name}) by `afd bench report`. A ratio above 1 is in our favour.",
        "",
        "| metric | peer | cells | ratio: lowest, median, highest | cells below 1 | measured |",
        "|---|---|---|---|---|---|",
    ]
    for (_, metric, peer), cells in groups.items():
        ratios = [cell.ratio for cell in cells]
        spread = f"{min(ratios):.2f}, {statistics.median(ratios):.2f}, {max(ratios):.2f}"
        lost = sum(ratio < 1 for ratio in ratios)
        dates = sorted({cell.date for cell in cells})
        when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        lines.append(f"| {metric} | {peer} | {len(cells)} | {spread} | {lost} | {when} |")
    lost_cells = [record for record in records if record.ratio < 1]
    if lost_cells:
        lines += ["", "Cells below 1, worst first:", "", "| case | metric | ours | peer | ratio |"]
        lines.append("|---|---|---|---|---|")
        worst = sorted(lost_cells, key=lambda record: record.ratio)
        lines += [
            f"| {r.case} | {r.metric} | {r.value:g} {r.unit} | {r.peer}: {r.peer_value:g} {r.unit}"
            f" | {r.ratio:.2f} |"
            for r in worst[:MOST_LOST]
        ]
        if len(worst) > MOST_LOST:
            lines += ["", f"{len(worst) - MOST_LOST} more are in [{name}]({name})."]
    return "\n".join([*lines, END])


def insert(text: str, rendered: str) -> str:
    """``text`` with the section in its place, or at the end of a page that has none yet."""
    before, begin, rest = text.partition(BEGIN)
    if not begin:
        return f"{text.rstrip()}\n\n{rendered}\n"
    return f"{before}{rendered}{rest.partition(END)[2]}"


def age(records: Iterable[Record], checkout: Checkout) -> str:
    """How the measured code relates to the code of today."""
    states = {checkout.changed(record.bench, record.commit) for record in records}
    if states == {False}:
        return "unchanged"
    if True in states:
        return "changed"
    return "unknown"


def index(found: Sequence[tuple[str, str, Sequence[Record]]], checkout: Checkout) -> str:
    """The page docs/results/README.md. found: page, record file and its records."""
    lines = [
        "# Results",
        "",
        "Every page reads the records beside it; `afd bench report` renders this list, the section",
        '*Records* of each page and the README\'s table. "Changed" means that the code which the',
        "benchmark measures has changed since: run the command of the records again.",
        "",
        "| page | records | machines | commits | code since |",
        "|---|---|---|---|---|",
    ]
    for page, name, records in found:
        machines = "; ".join(dict.fromkeys(record.machine for record in records))
        commits = ", ".join(sorted({record.commit for record in records}))
        lines.append(
            f"| [{page}]({page}) | [{len(records)}]({name}) | {machines} | {commits} |"
            f" {age(records, checkout)} |"
        )
    return "\n".join(lines) + "\n"
