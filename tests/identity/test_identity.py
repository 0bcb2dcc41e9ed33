"""Every family and format answers like vLLM alone and like Transformers, token for token."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from cases import FAMILIES, FORMATS, Model, drawn_sizes
from engines import Case, prompts
from hf import disagreements

from afd.demo.published.make import make_published
from afd.demo.sizes import PRESETS, Sizes

pytest.importorskip("vllm", reason="the package vllm is not installed; ./run test installs it")
pytestmark = pytest.mark.serve

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("AFD_TEST_SEED") or time.time())
"""Sizes of families are drawn from it. Every failure prints it; AFD_TEST_SEED repeats a run."""

Answers = dict[str, dict[str, object]]


def sizes_of(model: Model) -> Sizes:
    return PRESETS["tiny"] if model.stored_as != "plain" else drawn_sizes(model, SEED)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("identity")
    for model in (*FAMILIES, *FORMATS):
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


@pytest.fixture(scope="module")
def answers(folder: Path) -> Callable[[str, Model], dict[str, object]]:
    """Returns a function: side ("colocated" or "remote"), model -> what engines.py found."""
    models = (*FAMILIES, *FORMATS)
    cases = {
        "colocated": [case(folder / "twin", m) for m in models if not m.colocated],
        "remote": [case(folder, m) for m in models],
    }
    running = {}
    for side, listed in cases.items():
        (folder / f"{side}.json").write_text(json.dumps([asdict(entry) for entry in listed]))
        argv = [sys.executable, str(Path(__file__).with_name("engines.py")), side]
        argv += [str(folder / f"{side}.json"), str(folder / f"{side}-results.json")]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with (folder / f"{side}.log").open("wb") as log:
            running[side] = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path}
            )
    found: dict[str, Answers] = {}
    for side, process in running.items():
        process.wait(280)
        results = folder / f"{side}-results.json"
        assert results.is_file(), (folder / f"{side}.log").read_text(errors="replace")[-2000:]
        found[side] = {entry["name"]: entry for entry in json.loads(results.read_text())}

    def get(side: str, model: Model) -> dict[str, object]:
        entry = found[side][model.name]
        assert not entry["error"], f"{described(model)}: {entry['error']}"
        return entry

    return get


def case(folder: Path, model: Model) -> Case:
    return Case(model.name, str(folder / model.name), model.dtype, model.instances)


def described(model: Model) -> str:
    return f"{model.name}, AFD_TEST_SEED={SEED}, {sizes_of(model)}"


@pytest.mark.parametrize("model", (*FAMILIES, *FORMATS), ids=lambda model: model.name)
def test_same_tokens(
    model: Model, folder: Path, answers: Callable[[str, Model], dict[str, object]]
) -> None:
    """The same greedy tokens as colocated vLLM and as Transformers, in micro-batches.

    Quantised checkpoints are compared with their unquantised twins.
    """
    remote = answers("remote", model)
    tokens = remote["tokens"]
    assert isinstance(tokens, list) and len(tokens) == len(prompts())
    assert max(remote["depths"]) == model.depth, described(model)  # type: ignore[call-overload]
    if not model.colocated:
        assert tokens == answers("colocated", model)["tokens"], described(model)
    if model.transformers:
        assert disagreements(folder / "twin" / model.name, prompts(), tokens) == [], described(
            model
        )


def test_decoded_weights_are_logged(
    answers: Callable[[str, Model], dict[str, object]],
) -> None:
    by_name = {model.name: model for model in FORMATS}
    log = answers("remote", by_name["deepseek_v3-fp8_block"])["log"]
    assert any("in fp8_block are decoded to float32 at load" in line for line in log)  # type: ignore[attr-defined]
    log = answers("remote", by_name["kimi_k2-int4"])["log"]  # its attention is not quantised
    assert not any("attention weights" in line for line in log)  # type: ignore[attr-defined]
