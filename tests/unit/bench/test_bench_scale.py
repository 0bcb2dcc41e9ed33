"""`afd bench scale` on a small deployment; the arithmetic of its cases and records."""

from __future__ import annotations

from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd.records import read_records
from afd_bench.scale.cli import main
from afd_bench.scale.shared import Case


def test_a_case_is_written_like_40a24f() -> None:
    assert Case.of("40A24F") == Case(40, 24) and Case(8, 4).name == "8A4F"
    for text in ("40A", "0A1F", "4a2f", "4A2F "):
        with pytest.raises(ConfigError, match="is not a topology; write it like 40A24F"):
            Case.of(text)


@pytest.mark.timeout(120)
def test_four_attention_and_two_ffn_processes(tmp_path: Path) -> None:
    """Every answer is checked by its attention process; a wrong one ends the benchmark."""
    out = tmp_path / "scale.json"
    assert main(["4A2F", "--seconds", "0.5", "--announced", "8A2F", "--out", str(out)]) == 0
    written = read_records(out)
    steps = {record.metric: record.value for record in written if record.case == "8A2F announced"}
    assert 0 < steps["leader_us_per_step"] <= steps["leader_p99_us_per_step"]
    assert steps["leader_us_per_step"] < 5e3
    found = {record.metric: record for record in written if record.case == "4A2F"}
    assert len(written) == len(found) + len(steps)
    assert set(found) == {
        "leader_us_per_step",
        "start_s",
        "control_cores",
        "attention_back_s",
        "ffn_back_s",
    }
    assert found["leader_us_per_step"].value > 0
    assert 0 < found["start_s"].value < 60
    assert "| 8A2F |" in out.with_suffix(".md").read_text("utf-8")
    assert "| 4A2F |" in out.with_suffix(".md").read_text(encoding="utf-8")
