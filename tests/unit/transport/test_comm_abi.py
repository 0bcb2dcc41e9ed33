"""Our declarations of libraries that are loaded at run time, compared with the vendors' headers."""

import os
import subprocess
from pathlib import Path

import pytest

COMM = Path(__file__).parents[3] / "comm"
HEADERS = {
    "verbs": ("infiniband/verbs.h", ("/usr/include",), "verbs_abi_check.cc", ()),
    "cuda": ("cuda.h", ("/usr/local/cuda/include",), "gpu_abi_check.cc", ("-DCHECK_CUDA",)),
    "hip": ("hip/hip_runtime_api.h", ("/opt/rocm/include",), "gpu_abi_check.cc", ("-DCHECK_HIP",)),
}


@pytest.mark.parametrize("library", HEADERS)
def test_declarations_match_the_vendors_headers(library: str) -> None:
    header, folders, source, options = HEADERS[library]
    found = [folder for folder in folders if (Path(folder) / header).exists()]
    if not found:
        pytest.skip(f"{header} is not installed in {', '.join(folders)}")
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{COMM / 'src'}", f"-I{found[0]}"]
    done = subprocess.run(
        [*command, *options, str(COMM / "tests" / source)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
