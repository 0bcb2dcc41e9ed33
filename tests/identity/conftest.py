"""Checkpoints of every family and format, and what engines.py found for them."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cases import Model
from drawn import SEED, described, models_of, sizes_of
from engines import Case

from afd_demo.published.make import make_published

ROOT = Path(__file__).parents[2]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/identity: sizes were drawn with AFD_TEST_SEED={SEED}")


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> list[Model]:
    """Returns the models of the tests that were selected."""
    items = request.session.items
    return models_of(item.callspec.params for item in items if hasattr(item, "callspec"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, models: list[Model]) -> Path:
    """Returns a folder with a checkpoint per model, and in ``twin/`` those that vLLM alone reads:
    unquantised, and without image encoders."""
    root = tmp_path_factory.mktemp("identity")
    for model in models:
        twin, sizes = root / "twin" / model.name, sizes_of(model)
        make_published(
            model.layout, root / model.name, sizes, stored_as=model.stored_as, twin=twin, seed=SEED
        )
        if model.text_twin:
            make_published(model.text_twin, twin, sizes, seed=SEED)
        elif model.stored_as == "plain":
            twin.parent.mkdir(exist_ok=True)
            twin.symlink_to(root / model.name)
    return root


class _Engines:
    """Starts engines.py for a side when it is first asked for, and waits for it once."""

    def __init__(self, checkpoints: Path, models: Sequence[Model]) -> None:
        self._folder = checkpoints
        self._models = models
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._found: dict[str, dict[str, dict[str, Any]]] = {}

    def start(self, side: str) -> None:
        if side in self._running:
            return
        models = [m for m in self._models if side == "remote" or not m.colocated]
        where = self._folder if side == "remote" else self._folder / "twin"
        cases = [
            asdict(Case(m.name, str(where / m.name), m.dtype, m.instances, m.split)) for m in models
        ]
        (self._folder / f"{side}.json").write_text(json.dumps(cases))
        argv = [sys.executable, str(Path(__file__).with_name("engines.py")), side]
        argv += [str(self._folder / f"{side}.json"), str(self._folder / f"{side}-results.json")]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with (self._folder / f"{side}.log").open("wb") as log:
            self._running[side] = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
            )

    def answer(self, side: str, model: Model) -> dict[str, Any]:
        self.start(side)
        if side not in self._found:
            self._running[side].wait(280)
            results = self._folder / f"{side}-results.json"
            log = (self._folder / f"{side}.log").read_text(errors="replace")
            assert results.is_file(), log[-2000:]
            self._found[side] = {r["name"]: r for r in json.loads(results.read_text())}
        entry = self._found[side][model.name]
        assert not entry["error"], f"{described(model)}: {entry['error']}"
        return entry

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def engines(checkpoints: Path, models: list[Model]) -> Iterator[_Engines]:
    engines = _Engines(checkpoints, models)
    yield engines
    engines.close()


@pytest.fixture
def colocated(engines: _Engines) -> Callable[[Model], dict[str, Any]]:
    return lambda model: engines.answer("colocated", model)


@pytest.fixture
def remote(engines: _Engines) -> Callable[[Model], dict[str, Any]]:
    engines.start("remote")
    engines.start("colocated")  # beside it
    return lambda model: engines.answer("remote", model)
