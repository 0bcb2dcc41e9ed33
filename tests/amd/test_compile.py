"""Rung 2: every kernel compiles for CDNA3, CDNA4 and Hopper, to the instructions it should."""

import re

import pytest

pytest.importorskip("triton", reason="triton is not installed; pip install 'afd[amd]'")

from kernel_builds import TARGETS, Build, builds

CASES = [pytest.param(t, b, id=f"{t}-{b.name}") for t in TARGETS for b in builds(t)]


@pytest.mark.parametrize(("target", "build"), CASES)
def test_instructions_and_registers(compiled, target: str, build: Build) -> None:
    facts = compiled(target).index[build.name]
    assert facts["missing"] == []
    assert len(facts["spills"]) >= 2 and not any(facts["spills"].values())


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_each_target_converts_its_own_fp8_only(compiled, target: str) -> None:
    """Negative control: the conversion instruction of e4m3fn on gfx942 would mean e4m3fnuz."""
    other = {"gfx942": "fp8e4nv", "gfx950": "fp8e4b8"}[target]
    pattern = r"v_cvt_\w*fp8\w*"
    assert not re.search(pattern, compiled(target).text(f"quantise_fp8[{other}]"))
