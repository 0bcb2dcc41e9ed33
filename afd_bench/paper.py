"""`afd bench paper`: recomputes the figures of the Step-3 report with the planner.

Pure arithmetic; writes docs/results/paper.json and docs/results/paper.md.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from afd.records import Record, machine, today, write_records
from afd_planner.paper import DIFFERENCES, Cell, cells
from afd_planner.paper.predictions import Prediction, predictions

REPORT = "Step-3 report (arXiv 2507.19427)"
COMMAND = "afd bench paper"

_INTRO = f"""# The Step-3 report's figures, recomputed

`{COMMAND}`. {{same}} of {{all}} computed figures of the report are reproduced to the last printed
digit. {{given}} more are given: Table 4 states them, and they are our accelerator data. The inputs
are in `afd_planner/data/models` and `afd_planner/data/hardware`, the formulas in
[planner-model.md](../planner-model.md). `tests/unit/planner/test_planner_paper.py` checks every
figure.

- The report does not state two numbers of MiniMax M1. They are inferred from Tables 2 and 3: a
  Lightning state counts twice (read and write) and takes 10 FLOPs per element.

| where | given | computed | agree |
| --- | --- | --- | --- |"""

_PREDICTIONS = """
Not computed: the average of 3,910 tokens/GPU/s, DSv3-blog's 1,850, and the 2,880 estimated from
profiles, because they were measured and the report has no formula for them; and Figures 1 to 5,
which are plots.

## Measured figures and the model's predictions

The predictions use the default efficiencies, which were fitted to these figures. For Step-3's rows
of Table 8 the report names "latest Hopper GPUs"; the predictions assume H800.

| figure | measured | predicted | predicted / measured |
| --- | --- | --- | --- |"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="afd bench paper", description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/results"), help="folder of paper.json and paper.md"
    )
    args = parser.parse_args(argv)
    found, predicted = cells(), predictions()
    path = args.out / "paper.json"
    path.unlink(missing_ok=True)  # drops records of figures that no longer exist
    write_records(path, [*_cell_records(found), *_prediction_records(predicted)])
    path.with_suffix(".md").write_text(page(found, predicted), encoding="utf-8")
    computed = [cell for cell in found if not cell.given]
    same = sum(cell.agrees for cell in computed)
    print(
        f"{same} of {len(computed)} computed figures agree to the digit; see"
        f" {path.with_suffix('.md')}"
    )
    return 0


def page(found: Sequence[Cell], predicted: Sequence[Prediction]) -> str:
    """Returns the page: counts, differences with reasons, predictions, and every figure."""
    computed = [cell for cell in found if not cell.given]
    same = sum(cell.agrees for cell in computed)
    counts = {"same": same, "all": len(computed), "given": len(found) - len(computed)}
    lines = [_INTRO.format(**counts)]
    for where in dict.fromkeys(cell.where for cell in found):
        of = [cell for cell in computed if cell.where == where]
        given = sum(cell.where == where for cell in found) - len(of)
        lines.append(f"| {where} | {given} | {len(of)} | {sum(cell.agrees for cell in of)} |")
    lines += ["", "## Figures that differ", "", "| figure | report | here | why |"]
    lines += ["| --- | --- | --- | --- |"]
    for cell in found:
        if cell.key in DIFFERENCES:
            why = DIFFERENCES[cell.key]
            lines.append(f"| {_name(cell)} | {cell.printed} | {cell.rounded} | {why} |")
    lines.append(_PREDICTIONS)
    lines += [
        f"| {p.where}, {p.row}, {p.column} ({p.unit}) | {p.measured:.0f} | {p.predicted:.0f} "
        f"| {p.ratio:.2f} |"
        for p in predicted
    ]
    lines += ["", "## Every figure", "", "| figure | report | here | agrees |"]
    lines += ["| --- | --- | --- | --- |"]
    lines += [
        f"| {_name(cell)} | {cell.printed} | {cell.rounded} | {_agreement(cell)} |"
        for cell in found
    ]
    return "\n".join(lines) + "\n"


def _agreement(cell: Cell) -> str:
    return "given" if cell.given else "yes" if cell.agrees else "no"


def _name(cell: Cell) -> str:
    return f"{cell.where}, {cell.row}, {cell.column} ({cell.unit})"


def _cell_records(found: Iterable[Cell]) -> list[Record]:
    return [
        _record(cell.where, cell.row, cell.column, cell.value, cell.unit, float(cell.printed))
        for cell in found
    ]


def _prediction_records(predicted: Iterable[Prediction]) -> list[Record]:
    return [
        _record(f"{p.where} measured", p.row, p.column, p.predicted, p.unit, p.measured)
        for p in predicted
    ]


def _record(where: str, row: str, column: str, value: float, unit: str, printed: float) -> Record:
    return Record(
        bench="paper",
        case=f"{where}, {row}",
        metric=column,
        value=value,
        unit=unit,
        peer=REPORT,
        peer_value=printed,
        ratio=min(value, printed) / max(value, printed),
        machine=machine(),
        command=COMMAND,
        date=today(),
    )
