"""Rung 5 on the stand-in node: a captured step with a kernel's machine code, replayed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

NODE = Path(__file__).parents[1] / "rocm_node"
sys.path.insert(0, str(NODE))
import node  # noqa: E402

KERNELS = {
    "gfx942": ("quantise_fp8[fp8e4b8]", "e4m3fnuz"),
    "gfx950": ("quantise_fp8[fp8e4nv]", "e4m3fn"),
}


@pytest.mark.parametrize("arch", KERNELS)
def test_a_replayed_step_encodes_rows_with_our_machine_code(arch, compiled, tmp_path):
    library = node.build(tmp_path)
    if library is None:
        pytest.skip("g++, which compiles the stand-in node, is not installed")
    build, fp8 = KERNELS[arch]
    facts = compiled(arch).index[build]
    code = tmp_path / "code.bin"
    code.write_bytes(compiled(arch).code(build))
    words = [facts["kernel"], arch, str(facts["warps"]), str(facts["shared"]), fp8]
    command = [sys.executable, str(NODE / "kernel_case.py"), str(code), *words]
    environment = {**os.environ, **node.variables(library, torch=False)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
