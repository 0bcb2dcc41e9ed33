"""Fixture ``compiled``: the kernels, compiled once per test run and target."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.amd)


@dataclass(frozen=True)
class Compiled:
    """Output folder of compile_kernels.py for one target."""

    target: str
    folder: Path
    index: dict[str, dict[str, Any]]

    def text(self, name: str) -> str:
        return (self.folder / f"{name}.{'ptx' if self.target == 'sm_90' else 's'}").read_text()

    def code(self, name: str) -> bytes:
        return (self.folder / f"{name}.bin").read_bytes()


class Compiler:
    """Compiles a target's kernels at first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, Compiled] = {}

    def __call__(self, target: str) -> Compiled:
        if target not in self._done:
            out = self._folder / target
            # Allows fused multiply-add, which makes equal bytes harder to reach.
            environment = {
                "TRITON_CACHE_DIR": str(self._folder / "cache"),
                **os.environ,
                "TRITON_DEFAULT_FP_FUSION": "1",
                "TRITON_DISABLE_LINE_INFO": "1",  # an eighth of the time, and no test reads it
            }
            command = [sys.executable, str(HERE / "compile_kernels.py"), target, str(out)]
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=600
            )
            assert done.returncode == 0, done.stderr[-4000:]
            index = json.loads((out / "index.json").read_text())
            self._done[target] = Compiled(target, out, index)
        return self._done[target]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    pytest.importorskip("triton", reason="triton is not installed here; ./run test-amd")
    return Compiler(tmp_path_factory.mktemp("kernels"))
