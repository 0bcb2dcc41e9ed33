"""The figures of the Step-3 report: every cell agrees, except the listed differences."""

import json
from pathlib import Path

import pytest

from afd.records import read_records
from afd_bench.paper import main as bench_main
from afd_planner.paper import DIFFERENCES, cells
from afd_planner.paper.predictions import predictions
from afd_planner.paper.printed import MODELS, TABLE_2, TABLE_3, TABLE_6

CELLS = cells()
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(cell.key))
def test_each_printed_figure(cell):
    assert cell.agrees == (cell.key not in DIFFERENCES), f"{cell.rounded}, not {cell.printed}"


def test_differences_are_exactly_the_cells_that_differ():
    assert {cell.key for cell in CELLS if not cell.agrees} == set(DIFFERENCES)


def test_all_cells_of_the_tables_are_there():
    count = {where: sum(cell.where == where for cell in CELLS) for where in ("Table 2", "Table 6")}
    assert count == {"Table 2": 9 * 4, "Table 6": 9 * 12}
    assert tuple(TABLE_2) == tuple(TABLE_3) == tuple(TABLE_6) == tuple(MODELS)
    assert len({cell.key for cell in CELLS}) == len(CELLS)


@pytest.mark.parametrize(
    ("where", "row", "column", "printed"),
    [
        ("Section 6", "step-3", "stage slot", "272"),
        ("Section 6", "L20", "MB per slot", "235"),
        ("Section 6", "L20", "KV MB", "168"),
        ("Section 6", "L20", "tokens of context", "328"),
        ("Section 6", "L20", "servers", "6"),
        ("Section 6", "L4", "cards", "144"),
        ("Table 8", "4A2F", "extrapolated", "2693"),
        ("Table 8", "16A2F", "extrapolated", "898"),
        ("Section 7.3", "scaled to 600B", "3A4F", "3291"),
    ],
)
def test_the_figures_that_the_text_derives(where, row, column, printed):
    (cell,) = [cell for cell in CELLS if cell.key == (where, row, column)]
    assert (cell.printed, cell.rounded) == (printed, printed)


def test_default_efficiencies_fit_the_measurements():
    found = predictions()
    table_8 = {p.row: p.ratio for p in found if p.where == "Table 8"}
    assert set(table_8) == {"2A2F", "3A2F, BF16 attention", "4A2F", "DSv3-profile"}
    assert all(0.95 < ratio < 1.05 for ratio in table_8.values())
    table_9 = [p.ratio for p in found if p.where == "Table 9"]
    assert len(table_9) == 16
    assert all(0.85 < ratio < 1.30 for ratio in table_9)


def test_results_page_equals_the_output_of_the_bench(tmp_path):
    assert bench_main(["--out", str(tmp_path)]) == 0
    page = (tmp_path / "paper.md").read_text()
    assert page == (ROOT / "docs/results/paper.md").read_text(), "stale; run: afd bench paper"
    records = read_records(tmp_path / "paper.json")
    assert len(records) == len(CELLS) + len(predictions())
    kept = json.loads((ROOT / "docs/results/paper.json").read_text())
    assert [(r["case"], r["metric"], r["value"]) for r in kept] == [
        (r.case, r.metric, r.value) for r in records
    ]
