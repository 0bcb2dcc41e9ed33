"""Backend selection per batch: by shape, by pairs per expert, and from the device's tuning file."""

import json
from dataclasses import replace

import pytest

from afd.errors import ConfigError
from ffn_worker.moe.batch_selection import (
    UNMEASURED,
    Comparison,
    Selection,
    SelectionByMode,
    file_of,
    select,
    select_by_mode,
    selection_of,
    write_comparisons,
)
from ffn_worker.moe.tiles import LayerShape

WIDE = LayerShape(256, 256, 8, 8, 2, "fp8_block")
NARROW = replace(WIDE, width=128)
COMPARISONS = [
    Comparison.on(WIDE, 64, {"triton": 10, "deep_gemm": 20, "vllm_cuda": 11}),
    Comparison.on(WIDE, 8, {"triton": 10, "deep_gemm": 20, "vllm_cuda": 9}),
    Comparison.on(NARROW, 64, {"triton": 20, "deep_gemm": 10, "vllm_cuda": 11}),
    Comparison.on(replace(WIDE, shared=128), 128, {"triton": 20, "deep_gemm": 10}),
]


@pytest.mark.parametrize(
    ("scheme", "rows", "name"),
    [("plain", 9000, "vllm_cuda"), ("fp8_block", 127, "triton"), ("fp8_block", 128, "deep_gemm")],
)
def test_without_measurements(scheme, rows, name):
    assert Selection().of(replace(WIDE, scheme=scheme), rows) == name  # 128 rows: 32 pairs each


def test_a_measured_shape_uses_its_fastest_backend():
    choices = select(COMPARISONS)
    by_rows = {1: "vllm_cuda", 8: "vllm_cuda", 9: "triton", 64: "triton", 9000: "triton"}
    assert {rows: choices.of(WIDE, rows) for rows in by_rows} == by_rows
    assert choices.of(NARROW, 3) == "deep_gemm"


def test_an_unmeasured_shape_uses_the_cheapest_backend_for_its_pairs():
    """At 16 pairs, vllm_cuda costs at most 1.1 times the fastest; at 32, two backends have data."""
    choices, other = select(COMPARISONS), replace(WIDE, hidden=512)
    assert choices.schemes["fp8_block"] == ((2, "vllm_cuda"), (16, "vllm_cuda"), (32, "deep_gemm"))
    assert [choices.of(other, rows) for rows in (1, 127, 128)] == ["vllm_cuda"] * 2 + ["deep_gemm"]
    assert choices.of(replace(other, scheme="plain"), 1) == UNMEASURED["plain"][0][1]


def test_eager_calls_have_their_own_comparisons():
    by_host = Comparison.on(WIDE, 64, {"triton": 30, "deep_gemm": 20}, "eager")
    choices = select_by_mode([by_host, *COMPARISONS])
    assert choices.graph == choices.of("streams") == select(COMPARISONS)
    assert choices.of("eager").of(WIDE, 64) == "deep_gemm"
    assert choices.eager.of(NARROW, 64) == choices.graph.of(NARROW, 64)  # measured only as a graph
    assert choices.names("fp8_block") == {"triton", "deep_gemm", "vllm_cuda"}


def test_a_devices_tuning_file(tmp_path):
    """New comparisons are added; a repeated comparison replaces the older one."""
    device, told = "NVIDIA H200", ("afd bench moe --tune", "2026-11-22")
    assert selection_of(device, tmp_path) == SelectionByMode()
    slower = Comparison.on(NARROW, 64, {"triton": 20, "deep_gemm": 30})
    write_comparisons(device, [slower, COMPARISONS[0]], *told, tmp_path)
    assert selection_of(device, tmp_path).graph.of(NARROW, 64) == "triton"
    written = write_comparisons(device, COMPARISONS[1:], *told, tmp_path)
    assert (
        selection_of(device, tmp_path)
        == written
        == SelectionByMode(select(COMPARISONS), select(COMPARISONS))
    )
    assert written.names("fp8_block") == {"triton", "deep_gemm", "vllm_cuda"}
    assert written.names("plain") == {"vllm_cuda"}
    file = file_of(device, tmp_path)
    assert json.loads(file.read_text())["command"] == told[0]
    for wrong in ({}, {"races": [{"rows": 1}]}, {"races": [{**vars(COMPARISONS[0]), "us": 3}]}):
        selection_of.cache_clear()
        file.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="is not a tuning file"):
            selection_of(device, tmp_path)
