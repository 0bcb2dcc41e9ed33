"""Samples the clocks and power of this host's GPUs with nvidia-smi during a measurement.

Temporarily slow steps can be caused by the GPU's clock under a power or thermal limit. Sampling
never fails a measurement: without nvidia-smi, or if it lacks a field, there are no samples.
"""

import contextlib
import datetime
import os
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from afd_bench.servers import server_process

_PERIOD_MS = 100
_FIELDS = "timestamp,index,clocks.sm,power.draw,clocks_event_reasons.active"
_STOP_S = 5.0
# nvml.h: nvmlClocksEventReasons*, without idle and application clocks, which are not limits
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Sample:
    """One sample of one GPU.

    at_s: seconds of the epoch. sm_mhz: SM clock. watts: power. reasons: NVML's bit mask of the
    reasons that limit the clock.
    """

    at_s: float
    gpu: int
    sm_mhz: float
    watts: float
    reasons: int


@contextlib.contextmanager
def sampled(file: Path) -> Iterator[bool]:
    """Runs nvidia-smi in the block, which writes a sample to ``file`` every 100 ms.

    Yields whether nvidia-smi is installed.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        yield False
        return
    query = [
        program,
        f"--query-gpu={_FIELDS}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={_PERIOD_MS}",
    ]
    with server_process(query, os.environ, file, stop_s=_STOP_S):
        yield True


def parse(text: str) -> list[Sample]:
    """Parses a file of :func:`sampled`; skips incomplete lines and unsupported fields."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            moment, gpu, clock, watts, reasons = (part.strip() for part in line.split(","))
            at = datetime.datetime.strptime(moment, "%Y/%m/%d %H:%M:%S.%f")  # local time
            found.append(
                Sample(at.timestamp(), int(gpu), float(clock), float(watts), int(reasons, 16))
            )
    return found


def summary_text(samples: Sequence[Sample], begin_s: float, end_s: float) -> str:
    """Returns a line per GPU on the samples within a window, in seconds of the epoch."""
    lines = []
    for gpu in sorted({sample.gpu for sample in samples}):
        inside = [s for s in samples if s.gpu == gpu and begin_s <= s.at_s <= end_s]
        if not inside:
            continue
        clocks = [sample.sm_mhz for sample in inside]
        bits = 0
        for sample in inside:
            bits |= sample.reasons
        limits = ", ".join(name for bit, name in _REASONS.items() if bits & bit) or "none"
        lines.append(
            f"GPU {gpu}: clock {statistics.median(clocks):.0f} MHz, min {min(clocks):.0f}; power at"
            f" most {max(sample.watts for sample in inside):.0f} W; limits: {limits}"
            f" ({len(inside)} samples)"
        )
    return "\n".join(lines) or "no clocks were sampled during the timed steps"
