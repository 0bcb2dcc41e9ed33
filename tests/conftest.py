"""Shared fixtures: one tiny random checkpoint per model family, made once per test run."""

import gc
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

import hypothesis
import pytest

from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

# Puts cmake and ninja of the test extra on PATH, as activating the environment would.
os.environ["PATH"] = f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"

# A busy machine can keep a test from its core for longer than any example takes.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_configure() -> None:
    gc.disable()  # while the modules of the tests import torch and vLLM


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a function: family -> folder of its tiny checkpoint (bfloat16, deterministic)."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family)
            # Two layers with experts, so that one has a layer before it and one behind it.
            layers = 2 if family == "qwen3_moe" else 3
            make_model(family, made[family], resolve(family, "tiny", layers=layers))
        return made[family]

    return get
