"""`afd bench kernels`: what it measures, and its file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd_bench.tables.attention_torch import attention_us, lengths_of
from afd_bench.tables.cells import (
    MOST_CACHE_BYTES,
    AttentionCell,
    ExpertCell,
    MixedCell,
    cells,
    shrunk,
)
from afd_bench.tables.command import Table, main
from afd_planner.cost.kernels import FOLDER


def test_every_shard_of_8_to_64_gpus_is_measured() -> None:
    experts = {
        (cell.hidden, cell.num_experts, cell.experts, cell.width)
        for cell in cells()
        if isinstance(cell, ExpertCell) and cell.scheme == "fp8_block"
    }
    deepseek = {(held, width) for hidden, of, held, width in experts if (hidden, of) == (7168, 256)}
    assert {(32, 2048), (16, 2048), (8, 2048), (4, 2048)} <= deepseek  # EP 8 to 64
    assert {(64, 1024), (256, 256), (32, 256)} <= deepseek  # EP4 x TP2, TP8, EP8 x TP8
    assert (7168, 384, 48, 2048) in experts  # Kimi K2 on 8 GPUs
    assert (5120, 160, 3, 1536) in experts  # GLM-4.6 on 64 GPUs, the fullest one


def test_caches_are_those_that_a_gpu_can_hold() -> None:
    attention = [cell for cell in cells() if isinstance(cell, AttentionCell)]
    assert all(cell.cache_bytes <= MOST_CACHE_BYTES for cell in attention)
    kinds = {
        (cell.kind, cell.heads, cell.kv_heads, cell.head_dim, cell.cache) for cell in attention
    }
    for cache in ("fp8", "bfloat16"):
        assert ("mla", 128, 1, 576, cache) in kinds
        assert ("gqa", 64, 4, 128, cache) in kinds
        assert ("gqa", 64, 1, 256, cache) in kinds


def test_a_run_goes_on_where_the_last_one_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "kernels.json"
    command = ["--device", "cpu", "--stages", "rest", "--out", str(out)]
    assert main(command) == 0
    first = json.loads(out.read_text())
    assert (first["format"], first["gpu"]) == ("afd-kernel-times-1", "cpu")
    assert first["rest"][0]["rows"] == 3
    assert first["rest"][0]["us"] > 0
    assert main(command) == 0
    assert "0 of 1 cells to measure" in capsys.readouterr().out
    assert json.loads(out.read_text())["rest"] == first["rest"]


def test_a_file_of_another_gpu_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    assert main(["--device", "cpu", "--stages", "rest", "--budget-s", "0", "--out", str(out)]) == 1
    with pytest.raises(ConfigError, match="holds times of cpu, this is NVIDIA H200"):
        Table(out, "NVIDIA H200", {}).load()


def test_recorded_kernels_become_entries(tmp_path: Path) -> None:
    out, results = tmp_path / "h200.json", Path(__file__).parents[3] / "docs/results"
    assert main(["--records", str(results), "--out", str(out)]) == 0
    table = json.loads(out.read_text())
    shipped = json.loads((FOLDER / "h200.json").read_text())
    for kind in ("attention", "experts"):
        assert [entry for entry in shipped[kind] if "date" in entry] == table[kind]
    assert len(table["experts"]) > 100
    assert all(entry["used"] <= entry["experts"] for entry in table["experts"])


def test_a_dry_run_has_cells_of_every_stage() -> None:
    kinds = {type(shrunk(cell)) for cell in cells()}
    assert len(kinds) == 5


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_mixed_lengths_have_the_mean_of_equal_ones(kind: str) -> None:
    cell = next(cell for cell in cells() if type(cell) is MixedCell and cell.kind == kind)
    lengths = lengths_of(replace(cell, rows=64, context=4096), seed=1)
    assert abs(lengths.float().mean().item() - 4096) < 2
    assert 0.3 * 4096 < lengths.min() < 0.6 * 4096 and 1.4 * 4096 < lengths.max() < 1.7 * 4096
    assert attention_us(shrunk(cell), "cpu") > 0
