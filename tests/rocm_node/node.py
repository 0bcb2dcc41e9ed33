"""Builds the stand-in libamdhip64 and names the environment of processes that run on it."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARY = "libamdhip64.so"


def build(folder: Path) -> Path | None:
    """Compiles hip.cc into ``folder`` and returns it; None without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    flags = ["-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{ROOT / 'comm' / 'src'}"]
    subprocess.run([compiler, *flags, HERE / "hip.cc", "-o", folder / LIBRARY], check=True)
    return folder


def variables(
    library: Path, base: Mapping[str, str] = os.environ, *, torch: bool = True
) -> dict[str, str]:
    """The environment variables that put a process on the node.

    library: the folder that build() returned. torch: device rocm is the stand-in's
    (sitecustomize.py).
    """
    found = [str(ROOT), base.get("PYTHONPATH", "")]
    if torch:
        found = [str(HERE), str(ROOT / "tests" / "gpu"), *found]
    paths = [str(library), base.get("LD_LIBRARY_PATH", "")]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, found)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
        "STAND_IN_GPUS": "4",
    }
