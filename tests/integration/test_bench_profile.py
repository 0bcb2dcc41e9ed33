"""A CPU run of `afd bench gpu profile`: both roles run under a profiler and write a trace."""

import pytest

from afd_bench.gpu import profile

pytestmark = [pytest.mark.serve, pytest.mark.long]


def test_both_roles_write_a_trace(tmp_path, capsys):
    argv = ["--device", "cpu", "--model", "tiny", "--batch", "2", "--models", str(tmp_path)]
    assert profile.main([*argv, "--logs", str(tmp_path / "logs")]) == 0
    said = capsys.readouterr().out
    assert "attention: 0 graph launches" in said and "ffn: 0 graph launches" in said
