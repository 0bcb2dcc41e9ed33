"""Every family and format answers like vLLM alone and like Transformers, token for token."""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from drawn import DAMAGED, FLOAT32_GATE, beside_vllm, described, models_of

from afd_bench.agreement import compare
from afd_bench.families.cases import ALL, DRAFTS, FORMATS, Model
from afd_bench.families.engines import TOP, Result, prompts, texts
from afd_bench.families.hf import disagreements, distributions
from afd_bench.families.process import Engines

pytest.importorskip("vllm", reason="the package vllm is not installed; ./run test installs it")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.serve

Answer = Callable[[Model], Result]
LONG = {
    "deepseek_v3-eagle3",
    "glm4_moe-split",
    "qwen3_moe-eagle",
    "qwen3_moe-eagle3",
    "qwen3_moe-fp8_tensor",
    "qwen3_moe-gptq_ordered",
    "qwen3_moe-int4_all",
}
"""Forms of which CI runs a near relative."""


def parametrised(models: Iterable[Model]) -> pytest.MarkDecorator:
    marks = {True: [pytest.mark.long], False: []}
    named = [pytest.param(m, id=m.name, marks=marks[m.name in LONG]) for m in models]
    return pytest.mark.parametrize("model", named)


@parametrised(ALL)
def test_same_tokens(model: Model, checkpoints: Path, remote: Answer, colocated: Answer) -> None:
    """The same greedy tokens as colocated vLLM and as Transformers, in micro-batches.

    Quantised checkpoints are compared by their unquantised twins, with one of the two.
    """
    found = remote(model)
    assert len(found.tokens) == len(prompts())
    assert max(found.depths) == model.depth, described(model)
    if beside_vllm(model):
        assert found.tokens == colocated(model).tokens, described(model)
    if model.transformers:
        twin = checkpoints / "twin" / model.name
        assert disagreements(twin, prompts(), found.tokens) == [], described(model)


@parametrised(DRAFTS)
def test_drafts_change_no_token(
    model: Model, checkpoints: Path, remote: Answer, colocated: Answer
) -> None:
    """Draft layers: the tokens of Transformers without speculation, and as many of the drafts
    accepted as by colocated vLLM; with random weights none may be."""
    found, alone = remote(model), colocated(model)
    assert max(found.depths) == model.depth, described(model)
    if model.transformers:
        twin = checkpoints / model.name
        assert disagreements(twin, prompts(), found.tokens) == [], described(model)
    assert found.tokens == alone.tokens, described(model)
    assert (found.drafted, found.accepted) == (alone.drafted, alone.accepted), described(model)
    assert found.accepted < found.drafted, described(model)


@parametrised(FORMATS)
def test_formats_and_bytes_are_logged(model: Model, remote: Answer) -> None:
    log = remote(model).log
    decoded = [line for line in log if "are decoded to float32 at load" in line]
    experts_only = model.stored_as in ("int4", "mxfp4")
    assert len(decoded) == (not experts_only), log
    experts = [line for line in log if line.startswith("experts: ") and line.endswith(" GB")]
    assert len(experts) == model.instances, log
    assert [line for line in log if "reading attention weights: " in line and "GB/s" in line], log


def test_float32_gates_of_a_bfloat16_model(engines: Engines, float32_gate: Path) -> None:
    """vLLM alone ends with a signal: its float32 product writes into a bfloat16 tensor."""
    found = engines.result("remote", FLOAT32_GATE)
    assert not found.error, found.error
    exact, rounded = (
        distributions(float32_gate, texts(), dtype, TOP)
        for dtype in (torch.float32, torch.bfloat16)
    )
    scores = [[dict(position) for position in text] for text in found.scores]
    # Both round on their own way from the same exact values.
    assert compare(rounded, scores).kl < 2 * compare(exact, rounded).kl


def test_a_weight_that_does_not_fit_names_its_file(engines: Engines, damaged: Path) -> None:
    *_, last = engines.result("remote", DAMAGED).error.strip().splitlines()
    file = damaged / "model-00001-of-00002.safetensors"
    assert f"cannot load tensor model.layers.0.self_attn.o_proj.weight of {file} (" in last
    assert last.endswith("; use the config.json that belongs to these weights")


def test_parameters_of_other_tests_name_no_model() -> None:
    """In a run of several folders, other tests have parameters of the same name, or none of it."""
    assert models_of([{}, {"model": "mixtral"}, {"model": ALL[3]}, {"depth": 1}]) == [ALL[3]]
