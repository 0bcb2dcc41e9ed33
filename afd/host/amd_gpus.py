"""The AMD GPUs of this host, as its kernel driver lists them. Needs no ROCm and no torch."""

import re
from pathlib import Path

TOPOLOGY = Path("/sys/devices/virtual/kfd/kfd/topology/nodes")
RELEASE = Path("/opt/rocm/.info/version")
_VERSION = re.compile(r"^gfx_target_version (\d+)$", re.MULTILINE)


def architectures(topology: Path = TOPOLOGY) -> tuple[str, ...]:
    """Returns LLVM's name of each GPU ("gfx942"), in the driver's order; () without the driver.

    A partition of a GPU (mode CPX) counts as one. Environment variables that hide GPUs do not
    matter here.

    topology: the driver's folder of nodes. Each has a file ``properties``; a CPU has version 0
    there, and a GPU has major * 10000 + minor * 100 + stepping, as LLVM's AMDGPUArchByKFD.cpp
    reads it.
    """
    found = []
    for node in sorted(topology.glob("*/properties"), key=lambda file: int(file.parent.name)):
        try:
            text = node.read_text(encoding="ascii", errors="replace")
        except OSError:  # a container may hide the nodes of other GPUs
            continue
        match = _VERSION.search(text)
        if match and (version := int(match[1])):
            found.append(f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}")
    return tuple(found)


def rocm_version(release: Path = RELEASE) -> str | None:
    """Returns the version of the installed ROCm, such as "7.2.1"; None without one.

    release: a file with a line such as "7.2.1-43".
    """
    try:
        return release.read_text(encoding="ascii", errors="replace").strip().partition("-")[0]
    except OSError:
        return None
