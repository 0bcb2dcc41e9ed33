"""The kernel of gate and up without a GPU: its source, its tiles, and what NVRTC makes of it."""

import importlib.util
import re

import pytest

from afd.errors import ConfigError
from ffn_worker.kernels import cuda_driver, grouped

HAS_NVRTC = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")


def test_the_source_is_one_piece_with_its_instructions():
    text = grouped.source()
    assert "WGMMA_FUNCTIONS" not in text and "#include" not in text
    for rows in grouped.INSTRUCTIONS:
        assert f"m64n{rows}k32.f32.e4m3.e4m3" in text
    named = set(re.findall(r"%(\d+)", grouped.wgmma(32)))
    assert named == {str(i) for i in range(16 + 3)}  # 16 sums, two operands, whether it adds


def test_shared_memory():
    assert grouped.most_experts() > 256  # the most that a supported model has in a layer
    assert grouped.shared_bytes(grouped.most_experts()) <= 227 * 1024
    assert grouped.shared_bytes(grouped.most_experts() + 1) > 227 * 1024


@pytest.mark.skipif(HAS_NVRTC, reason="cuda-bindings is installed")
def test_without_nvrtc_there_is_one_sentence():
    with pytest.raises(ConfigError, match=r"install cuda-bindings, or use another ffn\.backend"):
        cuda_driver.compiled("", "empty.cu", ())


@pytest.mark.skipif(not HAS_NVRTC, reason="needs cuda-bindings and NVRTC")
def test_it_compiles_and_its_loops_keep_to_registers():
    from cuda.bindings import nvrtc

    _, program = nvrtc.nvrtcCreateProgram(grouped.source().encode(), b"grouped.cu", 0, [], [])
    options = [option.encode() for option in (*grouped.OPTIONS, "--ptxas-options=-v")]
    nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    said = b" " * size
    nvrtc.nvrtcGetProgramLog(program, said)
    nvrtc.nvrtcDestroyProgram(program)
    log = said.decode()
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled and int(spilled.group(1)) <= 32, log  # addresses, outside of the loops
    assert "serialized" not in log, log  # the instructions of a product one behind the other


@pytest.mark.skipif(not HAS_NVRTC, reason="needs cuda-bindings and NVRTC")
def test_a_source_that_is_refused_is_told():
    with pytest.raises(ConfigError, match=r"NVRTC refuses x\.cu: .*error"):
        cuda_driver.compiled("int f() { return y; }", "x.cu", grouped.OPTIONS)
