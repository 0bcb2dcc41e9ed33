"""The CUDA kernels of grouped products, without a GPU: sources, shared memory, NVRTC output."""

import importlib.util
import re

import pytest

from afd.errors import ConfigError
from ffn_worker.kernels import cuda_driver, grouped, grouped_plain

KERNELS = pytest.mark.parametrize("kernels", [grouped, grouped_plain])
HAS_NVRTC = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")


@KERNELS
def test_the_source_is_self_contained_and_has_its_instructions(kernels):
    text = kernels.source()
    left_out = ("WGMMA_FUNCTIONS", "MULTIPLY_BY_ROWS", "#include")
    assert not [name for name in left_out if name in text]
    kind = "k32.f32.e4m3.e4m3" if kernels is grouped else "k16.f32.bf16.bf16"
    for rows in kernels.INSTRUCTIONS:
        assert f"m64n{rows}{kind}" in text
    named = set(re.findall(r"%(\d+)", kernels.wgmma(32)))
    assert named == {str(i) for i in range(16 + 3)}  # 16 sums, two operands, the scale-D flag


def test_each_tile_uses_the_smallest_instruction_that_fits():
    text = re.search(r"if \(tile\.rows <= .*", grouped_plain.source())[0]
    for rows in range(1, grouped_plain.MOST_ROWS + 1):
        path = text
        while found := re.match(r"if \(tile\.rows <= (\d+)\) \{ (.*)", path):
            low, high = _both(found[2])
            path = low if rows <= int(found[1]) else high
        (n,) = map(int, re.findall(r"multiply<(\d+)", path))
        assert n == -(-rows // 8) * 8


def _both(text):
    """Returns the bodies of an if and its else; ``text`` begins inside the first brace."""
    depth, at = 1, 0
    while depth:
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        at += 1
    assert text[at:].startswith(" else { ")
    return text[: at - 2], text[at + len(" else { ") : -2]


@KERNELS
def test_shared_memory(kernels):
    assert kernels.most_experts() > 256  # the most experts per layer of any supported model
    assert kernels.shared_bytes(kernels.most_experts()) <= 227 * 1024
    assert kernels.shared_bytes(kernels.most_experts() + 1) > 227 * 1024


@pytest.mark.skipif(HAS_NVRTC, reason="cuda-bindings is installed")
def test_a_missing_nvrtc_gives_one_sentence():
    with pytest.raises(ConfigError, match=r"install cuda-bindings, or use another ffn\.backend"):
        cuda_driver.compiled("", "empty.cu", ())


@KERNELS
@pytest.mark.skipif(not HAS_NVRTC, reason="needs cuda-bindings and NVRTC")
def test_it_compiles_without_spills_in_its_loops(kernels):
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
    assert spilled and max(spilled) <= 32, log  # addresses, spilled outside the loops
    # ptxas must not serialize the wgmma instructions of a product.
    assert "serialized" not in log, log


@pytest.mark.skipif(not HAS_NVRTC, reason="needs cuda-bindings and NVRTC")
def test_a_compile_error_is_reported():
    with pytest.raises(ConfigError, match=r"NVRTC rejects x\.cu: .*error"):
        cuda_driver.compiled("int f() { return y; }", "x.cu", grouped.OPTIONS)
