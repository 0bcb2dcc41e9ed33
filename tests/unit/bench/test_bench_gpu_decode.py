"""`afd bench gpu decode`: the best cells, their table and their records."""

from dataclasses import replace

import pytest

from afd.records import read_records
from afd_bench.gpu import decode
from afd_bench.gpu.common import Report
from afd_bench.gpu.decode import Cell, Plan, best, table
from afd_bench.gpu.predict import Prediction
from afd_bench.gpu.targets import Afd, Colocated


def cell(target, requests, tpot_s, depth=0, context=1024):
    return Cell(target, depth, requests, context, tpot_s, Prediction(tpot_s, tpot_s, 0.0, 1.0, ""))


PLAN = Plan((64,), (1024,), (3,), (0.05, 0.1), 1.0, stretch=4.0, kv_bytes=1e9)


def test_the_best_cell_keeps_to_the_time_per_token_of_the_whole_model():
    cells = [
        cell(Afd(2, 2), 64, 0.010, 3),
        cell(Afd(2, 2), 256, 0.020, 2),
        cell(Colocated(4), 64, 0.009),
        cell(Colocated(4), 512, 0.026),
    ]
    assert best(cells, 1024, 0.05, 4.0, ours=True) is cells[0]  # 4 * 20 ms is over 50 ms
    assert best(cells, 1024, 0.1, 4.0, ours=True) is cells[1]
    assert best(cells, 1024, 0.1, 4.0, ours=False) is cells[2]  # 4 * 26 ms is over 100 ms
    with_rest = Cell(Afd(1, 1), 1, 1, 1, 0.01, Prediction(0.0, 0.0, 0.004, 1, ""))
    assert with_rest.whole_s(3) == pytest.approx(0.022)
    hosted = replace(with_rest, device_s=0.007)  # 3 ms of the host, once per step
    assert hosted.whole_s(3) == pytest.approx(0.004 + 3 * 0.003 + 0.003)
    text = table(cells, PLAN)
    assert "| 1024 | 50 ms | 2A2F exact depth 3 batch 64 | 1600 |" in text
    assert f"{1600 / (64 / 0.009 / 4):.2f}" in text
    assert "none" in table(cells[:2], PLAN)


def test_a_record_has_the_best_peer_of_its_batch(tmp_path):
    out = Report("gpu", tmp_path / "r.json", "c", machine="m")
    cells = []
    for one in (
        cell(Afd(1, 1), 64, 0.010, 3),
        cell(Colocated(2), 64, 0.012),
        cell(Colocated(1, 2), 64, 0.008),
    ):
        cells.append(one)
        decode._record(one, cells, "qwen3-30b", out)
    (record,) = read_records(tmp_path / "r.json")
    assert record.case == "qwen3-30b 1A1F exact depth 3 batch 64 context 1024"
    assert record.ratio == pytest.approx(0.8)


def test_a_record_of_a_kernel_has_the_same_deployment_with_vllms(tmp_path):
    out = Report("gpu", tmp_path / "r.json", "c", machine="m")
    cells = []
    for one in (
        cell(Afd(1, 1, kernel="mqa"), 64, 0.010, 2),
        cell(Afd(1, 1), 64, 0.011, 1),
        cell(Afd(1, 1), 64, 0.015, 2),
    ):
        cells.append(one)
        decode._record(one, cells, "step-3", out)
    (record,) = read_records(tmp_path / "r.json")
    assert record.case == "step-3 1A1F exact mqa depth 2 batch 64 context 1024"
    assert (record.peer, record.ratio) == ("attention.kernel vllm", pytest.approx(1.5))
