"""Compiles every kernel for one target without a GPU: python compile_kernels.py TARGET FOLDER.

One process per target: Triton keeps facts of the first target it met (3.6 fails gfx942 after
gfx950). Writes FOLDER/NAME.s or .ptx, FOLDER/NAME.bin and FOLDER/index.json.
"""

import json
import re
import sys
from pathlib import Path

from kernel_builds import Build, builds


def facts(build: Build, target: str, folder: Path) -> dict[str, object]:
    """Compiles one build; what the tests need to know of it."""
    compiled = build.compile(target)
    amd = "amdgcn" in compiled.asm
    text = compiled.asm["amdgcn" if amd else "ptx"]
    code = compiled.asm["hsaco" if amd else "cubin"]
    (folder / f"{build.name}.{'s' if amd else 'ptx'}").write_text(text)
    (folder / f"{build.name}.bin").write_bytes(code)
    spills = {
        name: int(count)
        for name, count in re.findall(r"\.(vgpr_spill_count|sgpr_spill_count):\s*(\d+)", text)
    }
    scratch = re.search(r"\.private_segment_fixed_size:\s*(\d+)", text)
    return {
        "kernel": build.kernel.fn.__name__,
        "shared": compiled.metadata.shared,
        "warps": build.warps,
        "spills": spills,
        "scratch": int(scratch[1]) if scratch else 0,
        "missing": [p for p in build.wanted.get(target, ()) if not re.search(p, text)],
    }


def main() -> None:
    target, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    index = {b.name: facts(b, target, folder) for b in builds(target)}
    (folder / "index.json").write_text(json.dumps(index, indent=1))


if __name__ == "__main__":
    main()
