"""The data behind docs/amd.md, and the climb to rung 6 as far as a host without AMD GPUs goes."""

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from afd.errors import AfdError, ConfigError
from afd.records import read_records
from afd_bench.amd import command, ladder
from afd_bench.amd.features import ARCHS, BEGIN, END, insert, read_features, records, table
from afd_bench.amd.ladder import Outcome, Result, Step, climb, read_result, read_steps
from afd_bench.amd.waves import copy_kernels, waves

ROOT = Path(__file__).parents[3]


def result(arch: str, *passed: str, date: str = "2027-01-01") -> Result:
    outcomes = tuple(Outcome(name, "passed", 1.0, "") for name in passed)
    return Result(arch, "a host", "7.13.0", {}, "abc", date, outcomes)


def found() -> list[Result]:
    return [read_result(path) for path in sorted((ROOT / command.RESULTS).glob("*.json"))]


def test_the_page_and_the_records_are_written_from_the_data():
    page = (ROOT / command.PAGE).read_text()
    assert insert(page, table(read_features(), found())) == page, "run afd bench amd"
    kept = {r.case: r.value for r in read_records(ROOT / command.RECORDS)}
    made = {r.case: r.value for r in records(read_features(), found(), "m", "2027-01-01")}
    assert made == kept, "run afd bench amd"


def test_every_feature_names_a_file_and_steps_that_exist():
    steps = {step.name for step in read_steps()}
    names = [feature.name for feature in read_features()]
    assert len(set(names)) == len(names)
    for feature in read_features():
        assert (ROOT / feature.file).is_file(), feature.file
        assert set(feature.steps) <= steps
        if not feature.steps:
            everything = [result(arch, *steps) for arch in ARCHS]
            assert all(6 not in feature.rungs(arch, everything) for arch in ARCHS)
        assert 6 not in (*feature.gfx942, *feature.gfx950), "rung 6 comes from result files only"


def test_tests_that_steps_run_exist():
    for step in read_steps():
        for word in step.command:
            if word.startswith("tests/"):
                assert (ROOT / word).is_file(), word


def test_a_result_raises_what_passed_on_its_architecture_only():
    features = {feature.name: feature for feature in read_features()}
    links = features["links over IPC between GPUs, SDMA copies"]
    assert links.steps == ("ipc", "sdma")
    assert links.rungs("gfx942", [result("gfx942", "ipc")]) == (1,)
    split = [result("gfx942", "ipc"), result("gfx942", "sdma")]
    assert links.rungs("gfx942", split) == (1,), "all steps of one climb"
    both = [
        result("gfx942", "ipc", "sdma", date="2027-02-01"),
        result("gfx942", "ipc", "sdma", "graphs"),
    ]
    assert links.rungs("gfx942", both) == (1, 6) and links.rungs("gfx950", both) == (1,)
    assert links.verified_on("gfx942", both) == "2027-01-01"
    (row,) = [line for line in table([links], both).splitlines() if "SDMA" in line]
    assert "| 1, 6 (2027-01-01) | 1 |" in row
    values = {r.case: (r.value, r.ratio) for r in records([links], both, "m", "2027-01-01")}
    assert list(values.values()) == [(6, 1.0), (1, pytest.approx(1 / 6))]
    assert len(values) == len(ARCHS)


def test_a_page_without_the_part_is_an_error():
    with pytest.raises(ValueError, match="no part between"):
        insert("a page", "text")
    assert insert(f"a {BEGIN} old {END} b", "new") == f"a {BEGIN}\n\nnew\n\n{END} b"


def step(name: str, *words: str, **needs: object) -> Step:
    return Step(name, name, needs.pop("gpus", 0), words, **needs)


def test_a_climb_runs_what_it_can_and_says_why_not(tmp_path):
    program = "import sys; print(sys.argv[1]); sys.exit(int(sys.argv[2]))"
    steps = [
        step("good", "{python}", "-c", program, "{out}", "0"),
        step("bad", "{python}", "-c", program, f"seen on {socket.gethostname()}", "3"),
        step("gpu", "true", gpus=1),
        step("tool", "true", tools=("no-such-program",)),
        step("module", "true", modules=("no_such_module",)),
        step("peer", "true", settings=("peer",)),
    ]
    shown = []
    made = climb(steps, {"out": "folder", "peer": ""}, seen=(), on_outcome=shown.append)
    assert made.outcomes == tuple(shown)
    assert [(o.name, o.status) for o in shown] == [
        ("good", "passed"), ("bad", "failed"), ("gpu", "skipped"), ("tool", "skipped"),
        ("module", "skipped"), ("peer", "skipped"),
    ]  # fmt: skip
    assert shown[0].text == "folder" and shown[1].text == "seen on HOST"
    assert [o.text for o in shown[2:]] == [
        "needs 1 AMD GPUs, this host has 0",
        "needs the program no-such-program",
        "needs the Python package no_such_module",
        "needs the option --peer",
    ]
    assert made.arch == "none" and made.passed == {"good"}
    made.save(tmp_path / "result.json")
    assert read_result(tmp_path / "result.json") == made
    again = climb([steps[0]], {"out": "."}, seen=("gfx950", "gfx950"))
    assert again.arch == "gfx950"


def test_a_step_that_hangs_fails(monkeypatch):
    monkeypatch.setattr(ladder, "STEP_S", 0.2)
    made = climb([step("slow", "{python}", "-c", "import time; time.sleep(9)")], {}, seen=())
    assert made.outcomes[0].status == "failed" and "not done within" in made.outcomes[0].text


def test_tests_that_were_all_skipped_verify_nothing():
    assert ladder.all_skipped("...\n4 skipped in 0.1s")
    assert not ladder.all_skipped("...\n1 passed, 4 skipped in 0.1s") and not ladder.all_skipped("")


def test_the_command_on_this_host(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(ladder, "architectures", lambda: ())
    out = tmp_path / "result.json"
    assert command.main(["--climb", str(out), "--only", "graphs", "served"]) == 0
    assert [o["status"] for o in json.loads(out.read_text())["outcomes"]] == ["skipped"] * 2
    assert "needs 2 AMD GPUs" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="step graph is unknown; use one of host, "):
        command.main(["--climb", str(out), "--only", "graph"])
    with pytest.raises(ConfigError, match=r"has no docs/amd\.md"):
        command.main(["--root", str(tmp_path)])
    out.write_text("{}")
    with pytest.raises(AfdError, match="is no result of afd bench amd --climb"):
        read_result(out)
    assert replace(result("gfx942"), rocm="x").passed == frozenset()


def test_waves_are_counted_from_the_profilers_trace():
    def row(name, x, y=1):
        return {"Kernel_Name": name, "Grid_Size_X": x, "Grid_Size_Y": y, "Grid_Size_Z": "1"}

    rows = [row("streamOpsWait", "1"), row("__amd_rocclr_copyBuffer", "4096", "2")]
    most = waves([*rows, row("streamOpsWait", "64")])
    assert most == {"streamOpsWait": 1, "__amd_rocclr_copyBuffer": 128}
    assert copy_kernels(most) == ["__amd_rocclr_copyBuffer"]
