"""Tuned tile files, the default tile rule, and the tile search with a fake clock."""

import sys
import time
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import fake_kernels  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd_bench.moe import tune as tune_module  # noqa: E402
from afd_bench.moe.layers import problem  # noqa: E402
from afd_bench.moe.tune import Bench, Candidate, heights, read_space, search, tune  # noqa: E402
from ffn_worker.moe import tiles  # noqa: E402
from ffn_worker.moe.tiles import Bucket, LayerShape, Tile, Tiling  # noqa: E402

SHAPE = LayerShape(7168, 640, 24, 48, 3, "fp8_block", shared=384)
TILE = Tile(128, 128, 8, 8, 3)


@pytest.mark.parametrize(
    ("rows", "scheme", "hip", "m"),
    [(64, "plain", False, 16), (512, "plain", True, 32), (1008, "plain", False, 64),
     (1024, "plain", False, 128), (4096, "plain", True, 64), (64, "fp8_block", False, 16),
     (512, "fp8_block", False, 64), (512, "fp8_block", True, 32), (64, "mxfp4", False, 64)],
)  # fmt: skip
def test_the_rule_has_no_more_rows_than_needed(rows, scheme, hip, m):
    shape = replace(SHAPE, scheme=scheme)
    tiling = tiles.default_tiling(shape, rows, hip)
    assert tiling.m == m and tiles.problem(shape, tiling) is None
    narrow = LayerShape(64, 96, 2, 2, 1, "plain")
    assert tiles.default_tiling(narrow, rows, hip).down.k == 32
    assert tiles.problem(narrow, tiles.default_tiling(narrow, rows, hip)) is None


def test_the_error_names_a_tiling_that_does_not_fit():
    good = Tiling(64, TILE, TILE)
    assert tiles.problem(SHAPE, good) is None
    for changed, why in (
        (replace(good, down=replace(TILE, k=256)), "640 is not a multiple of 256"),
        (replace(good, gate_up=replace(TILE, k=256)), "one scale covers 128 of the 256"),
        (replace(good, gate_up=replace(TILE, n=256)), "640 columns are not a multiple of 256"),
        (replace(good, gate_up=replace(TILE, n=64)), "does not fill a scale"),
        (replace(good, down=replace(TILE, n=256, swap=True)), "256 columns of fp8_block"),
    ):
        assert why in tiles.problem(SHAPE, changed)


def test_files_are_read_by_bucket(tmp_path):
    small, large = Tiling(16, TILE, TILE), Tiling(128, TILE, replace(TILE, warps=4))
    buckets = (Bucket(64, small, 10.5, 12.0), Bucket(1024, large, 30.0, 30.0))
    file = tmp_path / tiles.slug("NVIDIA H200") / f"{SHAPE.name}.json"
    assert file.parent.name == "nvidia-h200"
    assert file.stem == "h7168-w640-e24of48-k3-fp8_block-s384"
    tiles.write_buckets(file, "NVIDIA H200", SHAPE, buckets, "afd bench moe --tune", "2026-01-01")
    assert tiles.read_buckets(file) == buckets
    tiling = tiles.tuned_tilings("NVIDIA H200", False, tmp_path)
    assert [tiling(SHAPE, rows) for rows in (1, 64, 65, 9999)] == [small, small, large, large]
    other = replace(SHAPE, width=512)
    assert tiling(other, 64) == tiles.default_tiling(other, 64, False)
    assert tiles.tuned_tilings("NVIDIA H100", True, tmp_path)(SHAPE, 64) == tiles.default_tiling(
        SHAPE, 64, True
    )
    # A tuned tiling that the shape does not support (edited or outdated) is not an error.
    unfit = (Bucket(64, Tiling(64, replace(TILE, k=256), TILE), 1.0, 1.0),)
    tiles.write_buckets(file, "NVIDIA H200", SHAPE, unfit, "", "")
    fresh = tiles.tuned_tilings("NVIDIA H200", False, tmp_path)
    assert fresh(SHAPE, 64) == tiles.default_tiling(SHAPE, 64, False)
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is not a tuning file"):
        tiles.read_buckets(file)


def test_every_shipped_file_fits_its_shape():
    for file in tiles.FOLDER.glob("*/h*.json"):  # named by hidden size, width, ...
        assert tiles.read_buckets(file)


def test_the_search_measures_each_launch_separately():
    space = read_space()
    assert all(tiles.problem(replace(SHAPE, shared=0), Tiling(c.m, c.tile, c.tile), ("down",)) is
               None for c in space["fp8_block"])  # fmt: skip
    cuts, asked = space["plain"], []
    wanted = {"gate_up": cuts[7], "down": cuts[5]}
    assert wanted["gate_up"].m == wanted["down"].m == 32

    def evaluate(part, cut, limit):
        asked.append((part, cut))
        if cut.m == 16 and part == "down":
            return None
        return 1.0 if cut == wanted[part] else 2.0 + 0.001 * cut.m

    found = search(cuts, evaluate, time.monotonic() + 60)
    assert found[0] == (2.0, Tiling(32, wanted["gate_up"].tile, wanted["down"].tile))
    assert [tiling.m for _, tiling in found] == [32, 64, 128]
    assert len(asked) == len(set(asked)) == 2 * len(cuts)
    asked.clear()
    search(cuts, evaluate, time.monotonic() - 1)
    # Past the deadline, the search still measures one candidate per height and launch, plus
    # replacements of those that failed.
    assert len(asked) == 4 + 3 + sum(cut.m == 16 for cut in cuts)


def test_heights_that_the_search_tries():
    shape = LayerShape(2048, 768, 128, 128, 8, "plain")
    assert [[m for m in (16, 32, 64, 128) if m in heights(shape, rows)]
            for rows in (64, 512, 2048, 8192)] == [
        [16, 32, 64], [16, 32, 64, 128], [32, 64, 128], [64, 128],
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["[]", "{}", '{"fields": ["m"], "plain": []}'])
def test_a_file_that_is_not_a_search_space_is_refused(tmp_path, text):
    file = tmp_path / "space.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a search space"):
        read_space(file)


def test_wrong_or_refused_tiles_are_not_chosen(monkeypatch, caplog):
    """The complete tuner on fake kernels; the clock favours tiles that the tuner must refuse."""
    fake_kernels.install(monkeypatch)
    monkeypatch.setattr(Bench, "compile", lambda *_: None)  # needs Triton
    cuts = [Candidate(m, Tile(128, k, 8, warps, stages)) for m in (16, 32, 64)
            for k, warps, stages in ((64, 8, 2), (128, 4, 3), (64, 4, 2), (128, 4, 2))]  # fmt: skip
    taken = {}
    gemm = fake_kernels.grouped_gemm

    class Kernel(fake_kernels.Kernel):
        def __getitem__(self, grid):
            launch = super().__getitem__(grid)

            def recorded(*args, **given):
                taken[given["GATED"]] = given
                if given["num_warps"] == 4 and given["BM"] == 32:
                    raise RuntimeError("out of resource: shared memory")
                launch(*args, **given)
                if given["BK"] == 64 and given["GATED"]:
                    args[4].zero_()  # a miscompiled tile

            return recorded

    monkeypatch.setattr(sys.modules["ffn_worker.kernels.moe"], "grouped_gemm_kernel", Kernel(gemm))

    def clock(call, _repetitions):
        taken.clear()
        call()
        return 1e-6 * sum(
            100 - one["BM"] / 16 + one["BK"] / 64 + 9 * one["num_stages"]
            - 10 * (one["num_warps"] == 4)
            for one in taken.values()
        )  # fmt: skip

    shape = LayerShape(128, 128, 2, 4, 1, "plain", shared=80)
    with problem(shape, torch.device("cpu"), cache_bytes=0) as given:
        monkeypatch.setattr(tune_module, "default_tiling", lambda *_: Tiling(16, TILE, TILE))
        named, buckets = tune(given, (9, 6), {"plain": cuts}, clock, hip=True, seconds=60)
        better = Tiling(256, replace(TILE, stages=2), replace(TILE, stages=2))  # not in cuts
        _, again = tune(given, (9,), {"plain": cuts}, clock, True, 60, lambda *_: better)
    assert [bucket.tiling for bucket in again] == [better]
    assert named.name == "h128-w128-e2of4-k1-plain-s128"
    assert [bucket.rows for bucket in buckets] == [6, 9]
    for bucket in buckets:
        best = bucket.tiling
        assert best.gate_up.k == 128, "the tuner chose a tile with wrong results"
        assert best == Tiling(64, Tile(128, 128, 8, 4, 2), best.down) and best.down.k == 64
        assert bucket.us == pytest.approx(2 * (100 - 4 + 18 - 10) + 2 + 1)
        assert bucket.default_us == pytest.approx(2 * (100 - 1 + 2 + 27))
    assert "skipping it" in caplog.text
