"""`afd bench moe`: the roofline by hand, the records, and a tiny run on this host."""

import json
from dataclasses import replace
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import fake_kernels  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd_bench.moe import measure  # noqa: E402
from afd_bench.moe.cli import line, main, records  # noqa: E402
from afd_bench.moe.layers import batch, cost_of, problem  # noqa: E402
from afd_bench.moe.measure import Cell  # noqa: E402
from afd_bench.moe.shapes import SHAPES, Ceilings, in_scheme, layer_cost, named  # noqa: E402
from afd_bench.moe.timing import in_turns  # noqa: E402
from ffn_worker.moe import hopper  # noqa: E402
from ffn_worker.moe.batch_selection import Selection, SelectionByMode, select_by_mode  # noqa: E402
from ffn_worker.moe.deep_gemm import DeepGemmBackend  # noqa: E402
from ffn_worker.moe.grouped import GroupedBackend  # noqa: E402
from ffn_worker.moe.triton import TritonBackend  # noqa: E402
from ffn_worker.moe.vllm_cpu import load_operators  # noqa: E402


def test_roofline_of_a_layer():
    shape = in_scheme(SHAPES["step-3-tp8ep2-step"], "fp8_block")
    cost = layer_cost(shape, rows=2048, pairs=3072, experts_hit=24)
    one = 3 * 7168 * 640 * (1 + 4 / 16384)
    assert cost.nbytes == pytest.approx(24 * one + one / 2 + 2048 * 7168 * (1 + 4 / 128 + 2))
    assert cost.flops == 6 * 7168 * (3072 * 640 + 2048 * 320)
    fast_memory = Ceilings(1e15, 1e12)
    assert cost.seconds(fast_memory) == cost.flops / 1e12
    assert cost.bound(fast_memory) == "compute"
    slow_memory = Ceilings(1e9, 1e18)
    assert cost.seconds(slow_memory) == cost.nbytes / 1e9
    assert cost.bound(slow_memory) == "memory"
    four = layer_cost(in_scheme(shape, "mxfp4"), 2048, 3072, 24)
    assert four.nbytes < 0.75 * cost.nbytes and four.flops == cost.flops


def test_only_local_pairs_and_chosen_experts_count():
    shape = SHAPES["tiny-step"]  # 4 of 8 experts
    given = batch(shape, 64, torch.device("cpu"))
    assert len(set(map(tuple, given.ids.sort(1).values.tolist()))) > 1
    assert (given.ids[:, 0] != given.ids[:, 1]).all()
    local = int((given.ids < 4).sum())
    assert cost_of(shape, given) == layer_cost(shape, 64, local, 4)


def test_shapes():
    assert set(named("tiny")) == {"tiny", "tiny-step"} and "tiny" not in named("all")
    assert in_scheme(SHAPES["qwen3-30b-a3b-tp2"], "fp8_block").scheme == "fp8_block"
    with pytest.raises(ConfigError, match="unknown shape 'qwen'; use all, tiny"):
        named("qwen")
    for argv, message in (
        (["--schemes", "int8"], "use some of plain, fp8_block, mxfp4"),
        (["--modes", "lazy"], "use some of eager, graph"),
        (["--rows", "0"], "whole numbers above 0"),
        (["--device", "cpu", "--shapes", "tiny", "--tune"], "tiles of GPU kernels"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(argv)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU"):
            main([])


def test_records_say_who_was_quicker():
    layer = SHAPES["tiny"]  # 64 rows: 16 pairs per expert
    limits = Ceilings(4.2e12, 6.4e14)
    us = 50.0, 100.0, 60.0, 40.0
    cell = Cell("s", "plain", 64, "graph", "triton", *us, "memory", limits, 1e-3, layer)
    got = {r.peer: r for r in records(cell, "m", "c")}
    assert {peer: r.ratio for peer, r in got.items()} == {
        "vllm": 2.0, "roofline": 0.8, "shared apart": 1.2,
    }  # fmt: skip
    assert got["vllm"].case == "s plain 64 rows graph" and got["vllm"].unit == "us"
    said = "| triton | 50.0 | 100.0 | 2.00 |  |  | 60.0 | 40.0 | 80% | memory | 4.20 | 640 |"
    assert said in line(cell)
    several = replace(cell, times={"triton": 75.0, "deep_gemm": 50.0})
    slower = replace(several, mode="eager", times={"triton": 75.0, "deep_gemm": 90.0})
    race, by_host = measure.comparisons([cell, several, slower, replace(several, mode="streams")])
    assert race.pairs == 16 and race.us == several.times and by_host.mode == "eager"
    choices, unknown = select_by_mode([race, by_host]), SelectionByMode()
    best = measure.with_selection(several, choices)
    assert measure.with_selection(slower, choices).ours == "triton"
    assert (
        measure.with_selection(several, unknown).us == 75.0
        and measure.with_selection(cell, unknown) is cell
    )
    assert {r.peer: r.ratio for r in records(best, "m", "c")}["triton"] == 1.5
    assert "| deep_gemm | 50.0 | 100.0 | 2.00 | 75.0 | 50.0 |" in line(best)


def test_cells_of_a_step_whose_shared_expert_joins(monkeypatch):
    """What a GPU run measures, on stand-ins for the kernels."""
    fake_kernels.install(monkeypatch)
    fake_kernels.allow_cpu(monkeypatch, "triton", "deep_gemm", "grouped", "hopper")
    for backend in (TritonBackend, DeepGemmBackend, GroupedBackend):
        monkeypatch.setattr(backend, "unavailable", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU without tuned tiles")
    always = Selection(schemes={"plain": ((0, "triton"),)})
    choices = SelectionByMode(always, always)
    monkeypatch.setattr(hopper, "selection_of", lambda _: choices)
    monkeypatch.setattr(measure, "_CHECKED_ROWS", 8)

    def in_turns(_, calls, _round_s):
        return {name: 1e-6 for name, call in calls.items() if call() is not call}

    monkeypatch.setattr(measure, "in_turns", in_turns)
    shape = SHAPES["tiny-step"]
    for scheme in ("plain", "fp8_block"):
        with problem(in_scheme(shape, scheme), torch.device("cpu"), cache_bytes=0) as given:
            who = measure.contenders(given, "triton", "vllm_cpu")
            fits_vllm = scheme == "plain" and load_operators() is None
            ours = {"triton", "deep_gemm", "grouped"}
            others = {"apart", "vllm"} if fits_vllm else {"apart"}
            assert set(who) == ours | others
            (cell,) = measure.cells("s", given, (3,), ("eager",), ("triton", "vllm_cpu"))
        assert cell.us == cell.apart_us == 1.0 and (cell.vllm_us is None) is not fits_vllm
        assert 0 < cell.error < 0.1 and cell.ours == "triton"
        assert cell.times == dict.fromkeys(ours, 1.0)
        assert cell.layer.shared == 128
    with problem(SHAPES["tiny"], torch.device("cpu"), cache_bytes=0) as given:
        who = measure.contenders(given, "triton", "vllm_cpu")
    assert ("vllm_cpu" in who) == ("vllm" in who) == (load_operators() is None)


def test_all_take_turns():
    said = []
    calls = {name: partial(said.append, name) for name in "abc"}
    found = in_turns(torch.device("cpu"), calls, 1e-9)  # once a round
    assert set(found) == set(calls) and min(found.values()) > 0
    turns = said[9:]  # behind two calls to warm up, and one to see how long it takes
    assert len(turns) == 15
    assert all(sorted(turns[i : i + 3]) == list("abc") for i in range(0, 15, 3))


def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    from ffn_worker.moe.torch_grouped import TorchBackend

    forward = TorchBackend.forward
    monkeypatch.setattr(TorchBackend, "forward", lambda *args: forward(*args) * 1.5)
    argv = ["--device", "cpu", "--shapes", "tiny", "--rows", "2", "--schemes", "plain"]
    assert main(argv) == 1
    said = capsys.readouterr().out
    assert "failed: tiny plain: torch is wrong" in said and "| tiny | plain" not in said


def test_a_tiny_run(tmp_path, capsys):
    torch.set_num_threads(1)
    out = tmp_path / "moe.json"
    argv = ["--device", "cpu", "--shapes", "tiny", "--rows", "2", "--out", str(out)]
    assert main([*argv, "--schemes", "plain,fp8_block"]) == 0
    entries = json.loads(out.read_text())
    peers = {(entry["case"], entry["peer"]) for entry in entries}
    assert ("tiny plain 2 rows eager", "roofline") in peers
    assert ("tiny-step fp8_block 2 rows eager", "roofline") in peers
    assert "| tiny | fp8_block | 2 | eager |" in out.with_suffix(".md").read_text()
    assert main([*argv, "--schemes", "plain", "--seconds", "0"]) == 0
    assert "not measured within --seconds 0: tiny plain" in capsys.readouterr().out
