"""`afd bench paper`: the Step-3 report's figures against the planner's, as results files.

Pure arithmetic; writes docs/results/paper.json and paper.md.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from afd.bench.records import Record, machine, today, write_records
from afd.planner.paper import DIFFERENCES, Cell, cells
from afd.planner.paper.predictions import Prediction, predictions

REPORT = "Step-3 report (arXiv 2507.19427)"
COMMAND = "afd bench paper"

_INTRO = f"""# The Step-3 report's figures, recomputed

`{COMMAND}`. {{same}} of {{all}} printed figures come out to the printed digit from the facts in
`configs/models` and `configs/hardware`; formulas in [planner-model.md](../planner-model.md).
`tests/unit/test_planner_paper.py` holds every one of them. Table 4 is the source of our accelerator
facts, so only its rooflines are computed. Two numbers of MiniMax M1 are not stated and were
inferred from Tables 2 and 3: a Lightning state counts twice (read and written) and takes 10 FLOPs
per element.

| where | figures | agree |
| --- | --- | --- |"""

_PREDICTIONS = """
Not computed, because they were measured and no formula of the report gives them: the 3,910
tokens/GPU/s on average, DSv3-blog's 1,850, the 2,880 estimated from profiles; and Figures 1 to 5,
which are pictures.

## Measured figures and the model's predictions

With the default efficiencies, which were chosen on these figures. The report says "latest Hopper
GPUs" for Step-3's rows of Table 8; they are taken as H800.

| figure | measured | predicted | predicted / measured |
| --- | --- | --- | --- |"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="afd bench paper", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="results folder")
    args = parser.parse_args(argv)
    found, predicted = cells(), predictions()
    path = args.out / "paper.json"
    path.unlink(missing_ok=True)  # a cell that is gone must not stay
    write_records(path, [*_cell_records(found), *_prediction_records(predicted)])
    path.with_suffix(".md").write_text(page(found, predicted), encoding="utf-8")
    same = sum(cell.agrees for cell in found)
    print(
        f"{same} of {len(found)} printed figures agree to the digit; see {path.with_suffix('.md')}"
    )
    return 0


def page(found: Sequence[Cell], predicted: Sequence[Prediction]) -> str:
    """The readable page: counts, differences with their reasons, predictions, every cell."""
    same = sum(cell.agrees for cell in found)
    lines = [_INTRO.format(same=same, all=len(found))]
    for where in dict.fromkeys(cell.where for cell in found):
        of = [cell for cell in found if cell.where == where]
        lines.append(f"| {where} | {len(of)} | {sum(cell.agrees for cell in of)} |")
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
        f"| {_name(cell)} | {cell.printed} | {cell.rounded} | {'yes' if cell.agrees else 'no'} |"
        for cell in found
    ]
    return "\n".join(lines) + "\n"


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
