"""The transport under address and thread sanitizers, and a short fuzzing run of its parsers.

It runs the scripts of comm/tests with small counts; by default the scripts run longer.
"""

import os
import subprocess
from pathlib import Path

import pytest

COMM = Path(__file__).parents[2] / "comm"
pytestmark = pytest.mark.timeout(600)


def run(*command: str) -> str:
    environment = {**os.environ, "CMAKE_GENERATOR": "Ninja"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("build")


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_stress(sanitizer: str, build: Path) -> None:
    out = run(str(COMM / "tests" / "stress.sh"), "5", str(build), sanitizer)
    assert "close in use ok" in out
    assert "node ok" in out and "proxy ok" in out


def test_fuzz(build: Path) -> None:
    run(str(COMM / "tests" / "fuzz.sh"), "50000", str(build / "address"))
