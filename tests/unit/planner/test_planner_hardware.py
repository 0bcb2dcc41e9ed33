"""Accelerator data: completeness, sources, partitions, and errors."""

from dataclasses import replace
from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd_planner.facts.hardware import accelerators, load_accelerator, read_accelerator

WANTED = (
    "h800", "h20", "a800", "910b", "l20", "l4", "h100", "h200", "b200", "mi300x", "mi325x",
    "mi355x",
)  # fmt: skip
SOURCED = (
    "flops",
    "memory_bytes",
    "memory_bandwidth",
    "scale_up_bandwidth",
    "nic_bandwidth",
    "gpus_per_server",
    "price_per_hour",
)


def test_all_accelerators_are_there():
    assert set(WANTED) <= set(accelerators())


@pytest.mark.parametrize("name", accelerators())
def test_every_value_has_a_source(name):
    accelerator = load_accelerator(name)
    fitted = {"efficiency"} if accelerator.efficiency else set()
    assert set(accelerator.sources) == {*SOURCED, *fitted}
    assert all(len(source) > 10 for source in accelerator.sources.values())
    assert "bfloat16" in accelerator.flops


@pytest.mark.parametrize("name", accelerators())
def test_values_have_plausible_units(name):
    a = load_accelerator(name)
    assert 1e13 < a.flops["bfloat16"] < 1e16
    assert 1e10 < a.memory_bytes < 1e12
    assert 1e11 < a.memory_bandwidth < 2e13
    assert a.nic_bandwidth < a.scale_up_bandwidth < a.memory_bandwidth
    assert 0.1 < a.price_per_hour < 10
    assert a.owned_price_per_hour is None or a.owned_price_per_hour < a.price_per_hour


@pytest.mark.parametrize(
    ("name", "dtype", "same_as"),
    [
        ("a800", "fp8", "bfloat16"),
        ("h800", "mxfp4", "fp8"),
        ("b200", "mxfp4", "mxfp4"),
        ("910b", "int8", "bfloat16"),
        ("h200", "float16", "bfloat16"),
        ("h200", "float32", "bfloat16"),
    ],
)
def test_formats_without_support_run_in_the_next_wider_one(name, dtype, same_as):
    accelerator = load_accelerator(name)
    assert accelerator.math_flops(dtype) == accelerator.flops[same_as]


def test_no_wider_format_is_an_error():
    strange = replace(load_accelerator("h800"), flops={"fp8": 1e15})
    with pytest.raises(ConfigError, match="h800 lists no FLOP/s for bfloat16"):
        strange.math_flops("bfloat16")


@pytest.mark.parametrize("name", ["mi300x/cpx-nps4", "MI325X/CPX-NPS4", "mi355x/cpx-nps2"])
def test_a_partition_is_an_eighth(name):
    part, whole = load_accelerator(name), load_accelerator(name.partition("/")[0])
    assert part.memory_bytes * 8 == whole.memory_bytes
    assert part.flops["fp8"] * 8 == whole.flops["fp8"]
    assert part.gpus_per_server == 8 * whole.gpus_per_server
    assert part.price_per_hour * part.gpus_per_server == pytest.approx(
        whole.price_per_hour * whole.gpus_per_server
    )


def test_partitions_carry_the_warning_of_their_source():
    for name in ("mi300x", "mi325x", "mi355x"):
        (partition,) = load_accelerator(name).partitions
        assert "lose" in partition.warning and "KV cache" in partition.warning
        assert "dstack" in partition.source


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h900", "accelerator 'h900' is unknown; use one of .*h20, h200, h800"),
        ("h800/cpx", "h800 has no partition 'cpx'; known partitions: none"),
        ("mi300x/dpx", "mi300x has no partition 'dpx'; known partitions: cpx-nps4"),
        ("../models/step-3", "is unknown; use one of"),
    ],
)
def test_unknown_names(name, words):
    with pytest.raises(ConfigError, match=words):
        load_accelerator(name)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"memory_bytes": "memory_bytes: many"}, "x.yaml: memory_bytes: .*number"),
        ({"memory_bytes": "memory_bytes: -1"}, "x.yaml: memory_bytes: .*greater than 0"),
        ({"vendor": "colour: red"}, "x.yaml: vendor: Field required"),
        ({"title": "title: ["}, "cannot read"),
    ],
)
def test_a_wrong_file_is_one_sentence(tmp_path: Path, change, words):
    source = Path(__file__).parents[3] / "afd_planner/data/hardware/h800.yaml"
    lines = source.read_text().splitlines()
    lines = [change.get(line.partition(":")[0], line) for line in lines]
    file = tmp_path / "x.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=words):
        read_accelerator(file)
