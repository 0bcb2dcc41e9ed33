"""`afd bench allreduce`: its numbers, its table, and a run of two ranks on this CPU."""

import json
from functools import partial
from pathlib import Path

import pytest

from afd.errors import AfdError, ConfigError
from afd.records import read_records
from afd_bench import allreduce
from afd_bench.allreduce import KIB, MIB, Cell
from ffn_worker.allreduce.crossover import (
    DEFAULT,
    Algorithm,
    Crossover,
    crossover_of,
    measured_crossover,
    read_crossover,
)
from ffn_worker.allreduce.formats_table import FORMATS


def cells(world: int) -> list[Cell]:
    """NCCL 10 us + 1 us per 256 KiB; one shot wins up to 512 KiB, int4 from 1 MiB."""
    out = []
    for nbytes in (64 * KIB, 512 * KIB, MIB, 64 * MIB):
        nccl = 10 + nbytes / (256 * KIB)
        out.append(Cell(world, "nccl", nbytes, nccl))
        out.append(Cell(world, "one_shot", nbytes, 6 + nbytes / (100 * KIB)))
        out += [
            Cell(world, name, nbytes, 12 + nbytes / (256 * KIB) * f.bits_per_value / 16)
            for name, f in FORMATS.items()
        ]
    return out


def test_busbw_is_that_of_nccl_tests():
    assert Cell(2, "nccl", 10**9, 1e6).busbw == pytest.approx(1.0)
    assert Cell(4, "nccl", 10**9, 1e6).busbw == pytest.approx(1.5)


def test_records_have_ratios_where_more_is_better():
    found = {
        (r.case, r.metric): r
        for r in allreduce.records(cells(2), "cuda", "host", "c", "2026-01-01")
    }
    record = found[f"2 int4 {64 * MIB}", "latency"]
    assert record.bench == "allreduce" and record.peer == "nccl" and record.unit == "us"
    assert record.ratio == pytest.approx(266 / (12 + 72), abs=1e-3)
    assert found[f"2 int4 {64 * MIB}", "busbw"].ratio == record.ratio
    assert not any(r.case.split()[1] == "nccl" for r in found.values())


def test_the_measured_table_is_what_quickreduce_reads(tmp_path: Path):
    path = tmp_path / "h200.json"
    allreduce.write_table(path, cells(2), "2 x H200", "afd bench allreduce")
    allreduce.write_table(path, cells(4), "4 x H200", "afd bench allreduce")  # adds to it
    for world in (2, 3, 4, 8):  # 3 takes the row of 4, 8 that of the largest
        assert read_crossover(path, world, "bfloat16", "exact") == Crossover(512 * KIB, None)
        assert read_crossover(path, world, "bfloat16", "int4").two_shot_min_bytes == MIB
    assert read_crossover(path, 2, "bfloat16", "fp16").two_shot_min_bytes is None
    with pytest.raises(ConfigError, match="no row for float16"):
        read_crossover(path, 2, "float16", "int4")
    path.write_text('{"rows": [{"world": 2}]}')
    with pytest.raises(ConfigError, match="is not an all-reduce table"):
        read_crossover(path, 2, "bfloat16", "int4")


def test_exact_sums_use_quickreduce_where_that_was_measured(tmp_path: Path):
    allreduce.write_table(
        tmp_path / "nvidia-h200.json", cells(4), "4 x H200", "afd bench allreduce"
    )
    asked = partial(measured_crossover, folder=tmp_path)
    assert asked("NVIDIA H200", 2, "bfloat16", "exact") == Crossover(512 * KIB, None)
    assert asked("NVIDIA H200", 4, "bfloat16", "exact") == Crossover(512 * KIB, None)
    assert asked("NVIDIA H200", 8, "bfloat16", "exact") is None
    assert asked("NVIDIA H200", 2, "float16", "exact") is None
    assert asked("AMD Instinct MI300X", 2, "bfloat16", "exact") is None  # as published only


def test_algorithms_by_size():
    table = Crossover(one_shot_max_bytes=512, two_shot_min_bytes=2048)
    found = [table.algorithm(n) for n in (0, 512, 513, 2047, 2048)]
    assert found == [
        Algorithm.ONE_SHOT,
        Algorithm.ONE_SHOT,
        Algorithm.LIBRARY,
        Algorithm.LIBRARY,
        Algorithm.TWO_SHOT,
    ]
    assert Crossover(0, None).algorithm(1 << 30) is Algorithm.LIBRARY


def test_an_algorithm_that_loses_later_is_not_chosen_before():
    library = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
    assert crossover_of({}, library, {}) == Crossover(0, None)
    two = {1: 9.0, 2: 1.0, 4: 5.0, 8: 3.0}  # wins at 2, loses at 4
    assert crossover_of({1: 0.5, 2: 3.0, 4: 1.0}, library, two) == Crossover(1, 8)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_shipped_table_has_every_format_and_a_source(dtype: str):
    assert json.loads(DEFAULT.read_text())["source"]
    for world in range(2, 9):
        assert read_crossover(DEFAULT, world, dtype, "exact").two_shot_min_bytes is None
        for name in FORMATS:
            row = read_crossover(DEFAULT, world, dtype, name)
            assert row.one_shot_max_bytes < row.two_shot_min_bytes


@pytest.mark.long
def test_two_ranks_on_this_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "cpu.json"
    argv = ["--device", "cpu", "--most", "4096", "--seconds", "0.01", "--out", str(out)]
    assert allreduce.main(argv) == 0
    found = {(r.case, r.metric, r.peer) for r in read_records(out)}
    ways = ("exact", *FORMATS)
    assert found == {(f"2 {w} 4096", m, "gloo") for w in ways for m in ("latency", "busbw")}
    assert "| 2 ranks | gloo | exact | fp16 |" in capsys.readouterr().out


def test_more_ranks_than_gpus_is_one_sentence():
    with pytest.raises(AfdError, match="64 ranks need as many GPUs"):
        allreduce.main(["--device", "cuda", "--worlds", "64"])
