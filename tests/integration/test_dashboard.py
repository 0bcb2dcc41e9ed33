"""Every panel shows data and alerts tell of a killed FFN instance: a real Prometheus watches."""

from pathlib import Path

import pytest

from afd.errors import ConfigError
from afd_bench.operate.command import judged
from afd_bench.operate.prometheus import CACHE, find_programs
from afd_bench.operate.watched import watch

pytestmark = [pytest.mark.serve, pytest.mark.long]


def test_panels_and_alerts_while_an_ffn_instance_is_killed(tmp_path: Path) -> None:
    try:
        program, _ = find_programs(CACHE)
    except ConfigError as reason:
        pytest.skip(str(reason))
    wrong = [(case, text) for case, good, text in judged(watch(program, tmp_path)) if not good]
    assert not wrong
