"""The kernels of grouped products without a GPU: sources, memory, what NVRTC makes of them."""

import importlib.util
import re

import pytest

from afd.errors import ConfigError
from ffn_worker.kernels import cuda_driver, grouped, grouped_plain

KERNELS = pytest.mark.parametrize("kernels", [grouped, grouped_plain])
HAS_NVRTC = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")


@KERNELS
def test_the_source_is_one_piece_with_its_instructions(kernels):
    text = kernels.source()
    left_out = ("WGMMA_FUNCTIONS", "MULTIPLY_BY_ROWS", "#include")
    assert not [name for name in left_out if name in text]
    kind = "k32.f32.e4m3.e4m3" if kernels is grouped else "k16.f32.bf16.bf16"
    for rows in kernels.INSTRUCTIONS:
        assert f"m64n{rows}{kind}" in text
    named = set(re.findall(r"%(\d+)", kernels.wgmma(32)))
    assert named == {str(i) for i in range(16 + 3)}  # 16 sums, two operands, whether it adds


def test_a_tile_is_multiplied_by_the_least_instruction_that_holds_it():
    text = re.search(r"if \(tile\.rows <= .*", grouped_plain.source())[0]
    for rows in range(1, grouped_plain.MOST_ROWS + 1):
        path = text
        while found := re.match(r"if \(tile\.rows <= (\d+)\) \{ (.*)", path):
            low, high = _both(found[2])
            path = low if rows <= int(found[1]) else high
        (n,) = map(int, re.findall(r"multiply<(\d+)", path))
        assert n == -(-rows // 8) * 8


def _both(text):
    """What stands between the braces, of which the first is open, of an if and its else."""
    depth, at = 1, 0
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    assert text[at:].startswith(" else { ")
    return text[: at - 2], text[at + len(" else { ") : -2]


@KERNELS
def test_shared_memory(kernels):
    assert kernels.most_experts() > 256  # the most that a supported model has in a layer
    assert kernels.shared_bytes(kernels.most_experts()) <= 227 * 1024
    assert kernels.shared_bytes(kernels.most_experts() + 1) > 227 * 1024


@pytest.mark.skipif(HAS_NVRTC, reason="cuda-bindings is installed")
def test_without_nvrtc_there_is_one_sentence():
    with pytest.raises(ConfigError, match=r"install cuda-bindings, or use another ffn\.backend"):
        cuda_driver.compiled("", "empty.cu", ())


@KERNELS
@pytest.mark.skipif(not HAS_NVRTC, reason="needs cuda-bindings and NVRTC")
def test_it_compiles_and_its_loops_keep_to_registers(kernels):
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(kernels.source().encode(), b"kernels.cu", 0, [], [])
    options = [option.encode() for option in (*kernels.OPTIONS, "--ptxas-options=-v")]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    said = b" " * size
    nvrtc.nvrtcGetProgramLog(program, said)
    nvrtc.nvrtcDestroyProgram(program)
    log = said.decode()
    spilled = [int(found) for found in re.findall(r"(\d+) bytes spill stores", log)]
    assert spilled and max(spilled) <= 32, log  # addresses, outside of the loops
    assert "serialized" not in log, log  # the instructions of a product one behind the other


@pytest.mark.skipif(not HAS_NVRTC, reason="needs cuda-bindings and NVRTC")
def test_a_source_that_is_refused_is_told():
    with pytest.raises(ConfigError, match=r"NVRTC refuses x\.cu: .*error"):
        cuda_driver.compiled("int f() { return y; }", "x.cu", grouped.OPTIONS)
