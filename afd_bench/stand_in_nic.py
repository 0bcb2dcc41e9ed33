"""The libibverbs without hardware that backend verbs runs on where there is no NIC."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from afd.errors import AfdError

SOURCE = Path(__file__).parents[1] / "comm" / "tests" / "fake_ibverbs.cc"
PORTS = ("fake0:1", "fake1:1")


def build(folder: Path) -> Path:
    """Compiles the library into ``folder``. Raises AfdError without a checkout or a compiler."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None or not SOURCE.exists():
        raise AfdError(
            "backend verbs without a NIC needs comm/tests/fake_ibverbs.cc: run this in a checkout"
            " with a C++ compiler"
        )
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libfake_ibverbs.so"
    command = [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", str(SOURCE)]
    subprocess.run([*command, "-o", str(library), "-ldl"], check=True, timeout=300)
    return library
