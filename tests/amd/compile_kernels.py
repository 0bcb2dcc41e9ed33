"""Compiles every kernel for one target without a GPU: python compile_kernels.py TARGET FOLDER.

Use one process per target: Triton keeps state of the first target (Triton 3.6 cannot compile
gfx942 after gfx950). Writes FOLDER/NAME.s or .ptx, FOLDER/NAME.bin and FOLDER/index.json.
"""

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

from kernel_builds import Build, builds
from triton.backends.nvidia.compiler import get_ptxas


def _amd_spills(text: str) -> dict[str, int]:
    """Returns spilled registers and bytes of scratch memory from the kernel's metadata, by name."""
    names = "vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size"
    return {name: int(n) for name, n in re.findall(rf"\.({names}):\s*(\d+)", text)}


def _nvidia_spills(text: str, folder: Path) -> dict[str, int]:
    """Returns spilled bytes from the report of Triton's ptxas, by name."""
    source = folder / "report.ptx"
    source.write_text(text)
    command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", str(source)]
    command += ["-o", str(folder / "report.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stderr
    return {
        f"spill_{w}": int(n) for n, w in re.findall(r"(\d+) bytes spill (stores|loads)", report)
    }


def facts(build: Build, target: str, folder: Path) -> dict[str, object]:
    """Compiles one build. Returns its entry for index.json."""
    compiled = build.compile(target)
    amd = "amdgcn" in compiled.asm
    text = compiled.asm["amdgcn" if amd else "ptx"]
    code = compiled.asm["hsaco" if amd else "cubin"]
    (folder / f"{build.name}.{'s' if amd else 'ptx'}").write_text(text)
    (folder / f"{build.name}.bin").write_bytes(code)
    return {
        "kernel": build.kernel.fn.__name__,
        "shared": compiled.metadata.shared,
        "warps": build.warps,
        "spills": _amd_spills(text) if amd else _nvidia_spills(text, folder),
        "missing": [p for p in build.wanted.get(target, ()) if not re.search(p, text)],
    }


def main() -> None:
    target, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    gc.disable()  # a sixth of the time
    index = {b.name: facts(b, target, folder) for b in builds(target)}
    (folder / "index.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    main()
