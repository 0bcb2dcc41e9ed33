"""`afd bench wire_gpu` on device cpu: the code of the bench, not the speed of a wire."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from afd.errors import AfdError
from afd.records import read_records
from afd_bench import stand_in_nic
from afd_bench.wire_gpu import Cell, main, records


def test_all_backends_run_on_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AFD_FAKE_NIC_GBPS", "AFD_FAKE_NIC_BYTES"):
        monkeypatch.setitem(os.environ, name, "")  # restored behind the test
    out = tmp_path / "wire.json"
    sizes = ["--up", "5000", "--down", "9000", "--positions", "4", "--replays", "3"]
    given = ["--device", "cpu", "--depths", "3", "--work-us", "1", "--parts"]
    library = stand_in_nic.build(tmp_path)
    given += ["--out", str(out)]
    assert main([*given, *sizes, "--gbps", "100", "--library", str(library)]) == 0
    assert capsys.readouterr().out.count(", attention ") == 3  # all but ipc
    found = {(r.case, r.metric): r for r in read_records(out)}
    cases = [(f"{name} {depth} {gbps}", metric)
             for name, gbps in (("verbs", 100), ("staged", 100), ("tcp", 0))
             for depth, metric in ((1, "round_trip_us"), (3, "step_us"))]  # fmt: skip
    assert set(found) == set(cases)
    assert all(r.peer == "ipc" and r.bench == "wire_gpu" and r.value > 0 for r in found.values())


def test_ratios_are_above_one_where_ipc_is_slower() -> None:
    cells = [
        Cell("ipc", 3, 0, "step_us", 160.0, 170.0, 9),
        Cell("verbs", 3, 400, "step_us", 158.0, 165.0, 9),
        Cell("tcp", 1, 0, "round_trip_us", 90.0, 95.0, 9),
    ]
    (record,) = records(cells, "machine", "command", "2026-01-01")
    assert (record.case, record.metric, record.peer_value) == ("verbs 3 400", "step_us", 160.0)
    assert record.ratio == pytest.approx(1.013)


def test_a_nic_that_copies_nothing_has_cases_of_its_own() -> None:
    cell = Cell("staged", 3, 400, "step_us", 180.0, 187.0, 9, bytes_copied=False)
    assert cell.case == "staged 3 400 no bytes"


def test_a_gpu_for_each_side_has_cases_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert Cell("verbs", 1, 400, "round_trip_us", 76.0, 77.0, 9, gpus=2).case.endswith("on 2 GPUs")
    with pytest.raises(SystemExit):
        main(["--device", "cuda:0", "cuda:1", "cuda:2"])
    assert "one device for both sides, or two" in capsys.readouterr().err


def test_without_a_checkout_there_is_no_stand_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in_nic, "SOURCE", tmp_path / "absent.cc")
    with pytest.raises(AfdError, match="run this in a checkout with a C"):
        stand_in_nic.build(tmp_path)
