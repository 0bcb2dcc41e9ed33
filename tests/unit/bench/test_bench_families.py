"""`afd bench families`: which cases run, and what their results mean. No engine starts."""

import math
from functools import partial
from pathlib import Path

import pytest

from afd.errors import AfdError
from afd.records import Record
from afd_bench.families import command
from afd_bench.families.cases import FAMILIES, FORMATS, Model
from afd_bench.families.engines import Result
from afd_bench.families.process import Engines

EVEN = [[[(1, math.log(0.5)), (2, math.log(0.5))]]]
SKEWED = [[[(1, math.log(0.25)), (2, math.log(0.75))]]]


class Fake(Engines):
    """Has its results from the start."""

    def __init__(self, results: dict[tuple[str, str], Result]) -> None:
        self.results = results

    def result(self, side: str, name: str) -> Result:
        return self.results[side, name]


def found(model: Model, results: dict[tuple[str, str], Result]) -> dict[str, Record]:
    measured = partial(Record, bench="identity", machine="here", command="afd bench", date="today")
    return {r.metric: r for r in command._compared(model, Fake(results), Path(), measured)}


def test_cases_of_both_sides(tmp_path: Path) -> None:
    cases = command._cases((*FAMILIES, *FORMATS), tmp_path)
    remote, alone = ({case.name for case in cases[side]} for side in ("remote", "colocated"))
    assert "qwen3_moe-awq bfloat16" in remote and "qwen3_next float32" not in remote
    # vLLM's CPU attention takes the sinks of gpt-oss in bfloat16 only.
    assert "gpt_oss bfloat16" in alone and "gpt_oss float32" not in alone
    assert not any(name.startswith(("llama4", "minimax_m2")) for name in alone)
    assert all(case.scored for side in cases.values() for case in side)
    paths = {case.path for case in cases["colocated"]}
    assert all(path.startswith(str(tmp_path / "twin")) for path in paths)


def test_numbers_of_a_format() -> None:
    results = {
        ("remote", "qwen3_moe-awq float32"): Result("", tokens=[[1], [2]], scores=EVEN),
        ("colocated", "qwen3_moe-awq float32"): Result("", tokens=[[1], [3]], scores=EVEN),
        ("remote", "qwen3_moe-awq bfloat16"): Result("", scores=SKEWED),
        ("colocated", "qwen3_moe-awq bfloat16"): Result("", scores=SKEWED),
    }
    numbers = found(Model("qwen3_moe", "awq"), results)
    assert numbers["match"].case == "qwen3_moe awq float32" and numbers["match"].value == 0.5
    kl = numbers["kl"]  # as close as can be; rounding alone moves vLLM from EVEN to SKEWED
    assert (kl.case, kl.value) == ("qwen3_moe awq bfloat16", 0.0)
    assert kl.peer_value == pytest.approx(math.log(2 / math.sqrt(3)), abs=1e-4)
    assert kl.ratio == pytest.approx(kl.peer_value / 1e-6)
    assert numbers["top1"].value == 1.0


def test_without_a_peer_there_is_no_divergence() -> None:
    results = {("remote", f"kimi_k2 {dtype}"): Result("") for dtype in ("float32", "bfloat16")}
    assert found(Model("kimi_k2", colocated="not here", transformers=False), results) == {}


def test_an_engine_that_failed_is_one_sentence() -> None:
    results = {("remote", "mixtral float32"): Result("", error="Traceback\n...\nValueError: no\n")}
    with pytest.raises(AfdError, match=r"^remote float32: ValueError: no$"):
        found(Model("mixtral"), results)
