"""Which backend computes a batch: by shape, by pairs per expert, and from a file of the device."""

import json
from dataclasses import replace

import pytest

from afd.errors import ConfigError
from ffn_worker.moe.choice import (
    UNMEASURED,
    Choices,
    ChoicesByMode,
    Race,
    choices_of,
    chosen,
    chosen_by_mode,
    file_of,
    write_races,
)
from ffn_worker.moe.tiles import LayerShape

WIDE = LayerShape(256, 256, 8, 8, 2, "fp8_block")
NARROW = replace(WIDE, width=128)
RACES = [
    Race.on(WIDE, 64, {"triton": 10, "deep_gemm": 20, "vllm_cuda": 11}),
    Race.on(WIDE, 8, {"triton": 10, "deep_gemm": 20, "vllm_cuda": 9}),
    Race.on(NARROW, 64, {"triton": 20, "deep_gemm": 10, "vllm_cuda": 11}),
    Race.on(replace(WIDE, shared=128), 128, {"triton": 20, "deep_gemm": 10}),
]


@pytest.mark.parametrize(
    ("scheme", "rows", "name"),
    [("plain", 9000, "vllm_cuda"), ("fp8_block", 127, "triton"), ("fp8_block", 128, "deep_gemm")],
)
def test_without_measurements(scheme, rows, name):
    assert Choices().of(replace(WIDE, scheme=scheme), rows) == name  # 128 rows: 32 pairs each


def test_a_measured_shape_takes_what_was_quickest():
    choices = chosen(RACES)
    by_rows = {1: "vllm_cuda", 8: "vllm_cuda", 9: "triton", 64: "triton", 9000: "triton"}
    assert {rows: choices.of(WIDE, rows) for rows in by_rows} == by_rows
    assert choices.of(NARROW, 3) == "deep_gemm"


def test_another_shape_takes_what_costs_least_at_so_many_pairs():
    """At 16 pairs the worst that vllm_cuda costs is 1.1; at 32 only two backends were measured."""
    choices, other = chosen(RACES), replace(WIDE, hidden=512)
    assert choices.schemes["fp8_block"] == ((2, "vllm_cuda"), (16, "vllm_cuda"), (32, "deep_gemm"))
    assert [choices.of(other, rows) for rows in (1, 127, 128)] == ["vllm_cuda"] * 2 + ["deep_gemm"]
    assert choices.of(replace(other, scheme="plain"), 1) == UNMEASURED["plain"][0][1]


def test_calls_of_the_host_have_races_of_their_own():
    by_host = Race.on(WIDE, 64, {"triton": 30, "deep_gemm": 20}, "eager")
    choices = chosen_by_mode([by_host, *RACES])
    assert choices.graph == choices.of("streams") == chosen(RACES)
    assert choices.of("eager").of(WIDE, 64) == "deep_gemm"
    assert choices.eager.of(NARROW, 64) == choices.graph.of(NARROW, 64)  # raced as a graph only
    assert choices.names("fp8_block") == {"triton", "deep_gemm", "vllm_cuda"}


def test_the_file_of_a_device(tmp_path):
    """It is added to; what was measured again counts."""
    device, told = "NVIDIA H200", ("afd bench moe --tune", "2026-11-22")
    assert choices_of(device, tmp_path) == ChoicesByMode()
    slower = Race.on(NARROW, 64, {"triton": 20, "deep_gemm": 30})
    write_races(device, [slower, RACES[0]], *told, tmp_path)
    assert choices_of(device, tmp_path).graph.of(NARROW, 64) == "triton"
    written = write_races(device, RACES[1:], *told, tmp_path)
    assert choices_of(device, tmp_path) == written == ChoicesByMode(chosen(RACES), chosen(RACES))
    assert written.names("fp8_block") == {"triton", "deep_gemm", "vllm_cuda"}
    assert written.names("plain") == {"vllm_cuda"}
    file = file_of(device, tmp_path)
    assert json.loads(file.read_text())["command"] == told[0]
    for wrong in ({}, {"races": [{"rows": 1}]}, {"races": [{**vars(RACES[0]), "us": 3}]}):
        choices_of.cache_clear()
        file.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match="is no tuning file"):
            choices_of(device, tmp_path)
