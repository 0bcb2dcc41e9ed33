"""A dry run of `afd bench gpu profile`: both roles under their profilers, both traces come."""

import pytest

from afd.bench.gpu import profile

pytestmark = pytest.mark.serve


def test_both_traces_come(tmp_path, capsys):
    argv = ["--device", "cpu", "--model", "tiny", "--batch", "2", "--models", str(tmp_path)]
    assert profile.main([*argv, "--logs", str(tmp_path / "logs")]) == 0
    said = capsys.readouterr().out
    assert "attention: 0 graph launches" in said and "ffn: 0 graph launches" in said
