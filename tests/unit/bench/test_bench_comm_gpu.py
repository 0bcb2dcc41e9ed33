"""Arithmetic and page of `afd bench comm --device cuda`; measuring needs two GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from afd.errors import AfdError
from afd_bench import comm, comm_gpu

PAPER = comm_gpu.PAPER
IN_FLIGHT = {
    **{"up": PAPER[0], "down": PAPER[1], "rounds": 20_000, "p50": 102.0, "p99": 105.1},
    **{"max": 130.0, "alone_p50": 100.0, "alone_p99": 101.0, "alone_max": 110.0},
}


def cells(**p50: float) -> comm_gpu.Cells:
    def fields(value: float) -> dict[str, float]:
        times = {"p50": value, "mean": value + 1, "p99": 2 * value, "max": 3 * value}
        return {"rounds": 100.0, **times}

    return {(way, "graph", *PAPER): fields(value) for way, value in p50.items()}


def contention(way: str, gemm_ms: float, round_us: float, kernels: int) -> dict[str, float | str]:
    alone = {"gemm_alone_ms": 2.0, "round_alone_us": 20.0}
    both = {"gemm_loaded_ms": gemm_ms, "round_loaded_us": round_us}
    return {"way": way, **alone, **both, "kernels": kernels}


def test_ratios_say_that_more_is_better() -> None:
    records = comm_gpu.time_records(cells(ipc=20.0, copies=18.0, nccl=50.0), "", "command")
    by_key = {(r.peer, r.metric): r for r in records}
    assert by_key["bare copies", "p50"].ratio == 0.9
    assert by_key["NCCL send/recv", "p99"].ratio == 2.5
    rate = by_key["NCCL send/recv", "GBps"]
    assert rate.ratio == 2.5 and rate.value == pytest.approx(sum(PAPER) / 20e3, abs=1e-3)
    assert {r.case.partition(",")[0] for r in records} == {f"ipc {PAPER[0]}/{PAPER[1]}"}


def test_a_way_that_was_not_run_has_no_records() -> None:
    assert comm_gpu.time_records(cells(ipc=20.0), "", "command") == []
    assert comm_gpu.contention_records([contention("ipc", 2.0, 20.0, 0)], "", "command") == []


def test_slowdowns_and_kernels() -> None:
    contentions = [contention("ipc", 2.2, 22.0, 0), contention("nccl", 3.3, 60.0, 99)]
    records = {r.metric: r for r in comm_gpu.contention_records(contentions, ", x", "command")}
    gemm, trip = records["gemm_slowdown"], records["round_slowdown"]
    assert (gemm.value, gemm.peer_value, gemm.ratio) == (1.1, 1.65, 1.5)
    assert (trip.value, trip.peer_value) == (1.1, 3.0)
    kernels = records["kernels_per_50_rounds"]
    assert (kernels.value, kernels.peer_value, kernels.ratio) == (0, 99, 100)


def test_page_holds_every_cell() -> None:
    text = comm_gpu.table(
        cells(ipc=20.0, copies=18.0), [contention("ipc", 2.2, 22.0, 0)], [IN_FLIGHT], "command"
    )
    assert f"| {PAPER[0]} / {PAPER[1]} | graph | ipc | 100.0 | 20.0 |" in text
    assert "| ipc | 2.000 | 2.200 | 1.100 | 20.0 | 22.0 | 1.10 | 0 |" in text
    assert "| computing alone | 100.0 | 101.0 | 110.0 | 1.01 |  |" in text
    assert "| with transfers | 102.0 | 105.1 | 130.0 | 1.03 | 2.0 |" in text


def test_in_flight_against_the_computing_alone() -> None:
    records = {r.metric: r for r in comm_gpu.in_flight_records([IN_FLIGHT], "", "command")}
    assert set(records) == {"p50", "p99", "max"}
    p50 = records["p50"]
    assert (p50.value, p50.peer_value, p50.ratio) == (102.0, 100.0, 0.98)
    assert p50.case == f"ipc {PAPER[0]}/{PAPER[1]}, graph, 3 in flight behind computing"


def test_only_the_full_pipeline_is_timed() -> None:
    pytest.importorskip("torch")
    from afd_bench import comm_gpu_pipeline_torch as pipeline

    ends = [float(i * i) for i in range(pipeline.MESSAGES)]
    times = pipeline.steady(ends)
    assert (
        times[0] == 2 * pipeline.DEPTH + 1 and len(times) == pipeline.MESSAGES - 1 - pipeline.DEPTH
    )
    assert pipeline.quantiles([float(i) for i in range(101)]) == (50.0, 99.0, 100.0)
    # A replay's first flag of a slot differs from its last one, and each from the one before.
    assert pipeline.MESSAGES % pipeline.DEPTH == 0 and pipeline.MESSAGES > pipeline.DEPTH


def test_the_options_reach_the_gpu_bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = cells(ipc=20.0, copies=18.0), [contention("ipc", 2.2, 22.0, 0)], [IN_FLIGHT]
    asked = []
    monkeypatch.setattr(comm_gpu, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    monkeypatch.setattr(comm_gpu, "run", lambda *args: asked.append(args) or found)
    out = tmp_path / "gpu.json"
    options = ["--rounds", "500", "--ways", "ipc,copies", "--out", str(out)]
    assert comm.main(["--device", "cuda", *options]) == 0
    assert asked == [(500, ["ipc", "copies"], None)]
    cases = {record["case"] for record in json.loads(out.read_text())}
    assert any("in flight" in case for case in cases)
    assert "# Transport between two GPUs" in out.with_suffix(".md").read_text()
    with pytest.raises(SystemExit):
        comm.main(["--connections", "1"])  # an option of the GPU benchmark only


def test_without_two_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm_gpu, "gpu_names", lambda: ["NVIDIA H200"])
    with pytest.raises(AfdError, match="two NVIDIA GPUs"):
        comm_gpu.main([])
    monkeypatch.setattr(comm_gpu, "gpu_names", lambda: ["NVIDIA H200"] * 2)
    with pytest.raises(AfdError, match="99th percentile"):
        comm_gpu.main(["--rounds", "10"])
