"""`afd bench gpu host`: its deployments, its records, and the phases of a start."""

import json

import pytest

from afd_bench.gpu import common, host
from afd_bench.gpu.common import Report, usable_gpus
from afd_bench.gpu.host import Cell, deployments, phases


def test_both_sides_share_one_gpu_with_and_without_lookahead():
    found = deployments(1, "both")
    assert [t.lookahead for t in found] == [True, False]
    assert all(t.shared == 1 and t.dummy and t.graphs for t in found)
    assert [t.shared for t in deployments(2, "on")] == [None]
    assert [t.shared for t in deployments(0, "on")] == [None]


def test_a_bench_uses_the_gpus_that_the_variables_allow(monkeypatch):
    monkeypatch.setattr(common, "gpu_names", lambda: ["H200"] * 4)
    assert usable_gpus({}) == 4
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "1"}) == 1
    assert usable_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1,2"}) == 2


def test_a_step_is_compared_with_its_aim_and_its_time_on_the_device(tmp_path, capsys):
    out = Report("host", tmp_path / "host.json", "afd bench gpu host", "one H200")
    for cell in (
        Cell(48, 256, "H200", True, 0.0408, 0.04),
        Cell(12, 256, "H200", False, 0.012, 0.010),
        Cell(4, 8, "cpu", False, 0.012, 0.0),  # not replayed: no record
    ):
        host._report(cell, out)
    made = json.loads((tmp_path / "host.json").read_text())
    found = {(r["case"], r["metric"]): (r["value"], r["peer_value"], r["ratio"]) for r in made}
    assert found == {
        ("48 256 H200", "step_over_device"): pytest.approx((1.02, 1.03, 1.03 / 1.02)),
        ("48 256 H200", "step_ms"): pytest.approx((40.8, 40.0, 40.0 / 40.8)),
        ("12 256 H200 no lookahead", "step_over_device"): pytest.approx((1.2, 1.15, 1.15 / 1.2)),
        ("12 256 H200 no lookahead", "step_ms"): pytest.approx((12.0, 10.0, 10.0 / 12.0)),
    }
    assert "not replayed" in capsys.readouterr().out


def test_phases_are_what_afd_serve_said_until_it_was_ready():
    log = "\n".join(
        [
            "[afd] starting model m",
            "[afd] 2 s, ffn-0 is importing torch",
            "[ffn-0] 2 s, this is another's line",
            "[afd] ready after 17 s: http://127.0.0.1:1/v1 (model m)",
            "[afd] stopped",
        ]
    )
    assert phases(log) == ["2 s, ffn-0 is importing torch", "ready after 17 s"]
