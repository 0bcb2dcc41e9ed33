"""Waves that copies between GPUs and stream waits take, seen by rocprofv3.

``python -m afd_bench.amd.waves``: runs `afd doctor --active --device rocm` under the profiler and
prints the kernels that ROCclr launched by itself, with their waves. A copy that stays on SDMA
launches none. Exit status 1 if a copy launched one. Has not run on AMD hardware.
"""

import csv
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

WAVE = 64
"""Lanes of a wave on CDNA."""
COPIES = ("copybuffer", "copyimage", "copyrect", "blit")
"""Parts of the names of ROCclr's copy kernels (clr: rocclr/device/blitcl.cpp)."""


def waves(rows: Iterable[Mapping[str, str]]) -> Counter[str]:
    """Most waves of one launch, by kernel, from rocprofv3's kernel trace."""
    most: Counter[str] = Counter()
    for row in rows:
        lanes = 1
        for axis in "XYZ":
            lanes *= int(row[f"Grid_Size_{axis}"])
        name = row["Kernel_Name"]
        most[name] = max(most[name], -(-lanes // WAVE))
    return most


def copy_kernels(most: Mapping[str, int]) -> list[str]:
    """The kernels among them that copy memory."""
    return [name for name in most if any(part in name.lower() for part in COPIES)]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        doctor = [sys.executable, "-m", "afd_launch.cli", "doctor", "--active", "--device", "rocm"]
        doctor += ["--only", "slots"]  # torch would launch kernels of its own
        profiler = ["rocprofv3", "--kernel-trace", "--output-format", "csv", "-d", folder, "--"]
        done = subprocess.run([*profiler, *doctor], capture_output=True, text=True, timeout=300)
        print(done.stdout.strip())
        if done.returncode:
            print(done.stderr.strip()[-2000:])
            return 1
        rows: list[Mapping[str, str]] = []
        for file in Path(folder).rglob("*kernel_trace.csv"):
            with file.open(encoding="utf-8", newline="") as text:
                rows += csv.DictReader(text)
    most = waves(rows)
    for name, count in most.most_common():
        print(f"{count} waves at most: {name}")
    copies = copy_kernels(most)
    print(f"copy kernels: {', '.join(copies) or 'none; copies stay on SDMA'}")
    return int(bool(copies))


if __name__ == "__main__":
    sys.exit(main())
