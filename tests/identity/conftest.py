"""Checkpoints of every family and format, and what engines of both sides found for them."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from drawn import DAMAGED, FLOAT32_GATE, SEED, beside_vllm, described, models_of, sizes_of

from afd_bench.families.cases import Model
from afd_bench.families.engines import Case, Result
from afd_bench.families.process import Engines, head_of, write_checkpoint
from afd_demo.sizes import PRESETS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.write_line(f"tests/identity: sizes were drawn with AFD_TEST_SEED={SEED}")


@pytest.fixture(scope="session")
def models(request: pytest.FixtureRequest) -> list[Model]:
    """Returns the models of the tests that were selected."""
    items = request.session.items
    return models_of(item.callspec.params for item in items if hasattr(item, "callspec"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, models: list[Model]) -> Path:
    """Returns a folder of a checkpoint per model, and in ``twin/`` one that vLLM alone reads."""
    root = tmp_path_factory.mktemp("identity")
    for model in models:
        write_checkpoint(model, root, sizes_of(model), SEED)
    return root


@pytest.fixture(scope="session")
def float32_gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(FLOAT32_GATE)
    write_checkpoint(Model("minimax_m2"), folder, PRESETS["tiny"], seed=0)
    return folder / "minimax_m2"


@pytest.fixture(scope="session")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file  # torch may be missing

    folder = tmp_path_factory.mktemp(DAMAGED)
    write_checkpoint(Model("qwen3_moe"), folder, PRESETS["tiny"], seed=0)
    file = folder / "qwen3_moe" / "model-00001-of-00002.safetensors"
    stored = load_file(file)
    name = "model.layers.0.self_attn.o_proj.weight"
    save_file(stored | {name: stored[name][:-8].contiguous()}, file)
    return folder / "qwen3_moe"


@pytest.fixture(scope="session")
def engines(
    checkpoints: Path, models: list[Model], damaged: Path, float32_gate: Path
) -> Iterator[Engines]:
    def case(model: Model, root: Path) -> Case:
        path = str(root / model.name)
        head = None if model.method == "mtp" else str(head_of(checkpoints / model.name))
        return Case(
            model.name,
            path,
            model.dtype,
            model.instances,
            model.split,
            drafts=model.drafts,
            method=model.method,
            head=head,
            prefix_caching=model.prefix_caching,
        )

    alone = [model for model in models if beside_vllm(model)]
    engines = Engines(
        checkpoints,
        {
            # The damaged one is last: an engine that fails leaves its process groups behind.
            "remote": [
                *(case(model, checkpoints) for model in models),
                Case(FLOAT32_GATE, str(float32_gate), "bfloat16", scored=True),
                Case(DAMAGED, str(damaged)),
            ],
            "colocated": [case(model, checkpoints / "twin") for model in alone],
        },
    )
    yield engines
    engines.close()


def _answer(engines: Engines, side: str, model: Model) -> Result:
    result = engines.result(side, model.name)
    assert not result.error, f"{described(model)}: {result.error}"
    return result


@pytest.fixture
def colocated(engines: Engines) -> Callable[[Model], Result]:
    return lambda model: _answer(engines, "colocated", model)


@pytest.fixture
def remote(engines: Engines) -> Callable[[Model], Result]:
    engines.start("remote")
    engines.start("colocated")  # beside it
    return lambda model: _answer(engines, "remote", model)
