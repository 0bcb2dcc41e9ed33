"""Rung 1: our calls into AITER and QuickAllReduce fit the recorded signatures."""

import importlib.util
from pathlib import Path

import pytest
from signatures import calls, load, problem, read, recorded_parameters, unrecorded_imports

ROOT = Path(__file__).parents[2]
CALLERS = [ROOT / "ffn_worker/moe/aiter.py", ROOT / "ffn_worker/allreduce/aiter_quickreduce.py"]
ENUMS = ["aiter.ActivationType", "aiter.QuantType"]


@pytest.mark.parametrize("path", CALLERS, ids=lambda p: p.name)
def test_our_calls_fit_the_recorded_signatures(path: Path) -> None:
    recorded = load()
    found = list(calls(path, set(recorded)))
    assert len(found) >= 3
    assert [p for p in (problem(c, recorded[c.target]) for c in found) if p] == []
    assert unrecorded_imports(path, {*recorded, *ENUMS}, ("aiter", "vllm")) == []


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("fused_moe(x, w1, w2, weights, ids, quant_typ=0)", "unexpected keyword"),
        ("fused_moe(x, w1, w2, weights)", "missing a required argument: 'topk_ids'"),
        ("shuffle_weight()", "missing a required argument: 'x'"),
        ("communicator.quick_all_reduce(x, y)", "too many positional"),
    ],
)
def test_a_wrong_call_is_detected(tmp_path: Path, call: str, reason: str) -> None:
    """Negative controls."""
    source = tmp_path / "caller.py"
    source.write_text(
        "from aiter.fused_moe import fused_moe\n"
        "from aiter.ops.shuffle import shuffle_weight\n"
        "from aiter.dist.device_communicators.quick_all_reduce import QuickAllReduce\n"
        f"{call}\n"
    )
    recorded = load()
    (found,) = calls(source, set(recorded))
    assert reason in problem(found, recorded[found.target])


def test_the_installed_vllm_has_the_recorded_signatures() -> None:
    spec = importlib.util.find_spec("vllm")  # located only; importing it takes half a minute
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    folder = Path(spec.submodule_search_locations[0]).parent
    names = [name for name in load() if name.startswith("vllm.")]
    assert len(names) == 3
    for name in names:
        assert read(folder, name) == recorded_parameters(name)
