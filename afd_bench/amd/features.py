"""Every serving feature on AMD GPUs and its rung: the data of docs/amd.md and of the records. Pure.

What CI and hands have seen is in features.json. Rung 6 is never written there: it comes from a
result file of :mod:`afd_bench.amd.ladder`, made on the hardware.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.devices.rocm import FP8_OF_ARCH
from afd.records import Record
from afd_bench.amd.ladder import Result

FILE = Path(__file__).with_name("features.json")
ARCHS = tuple(FP8_OF_ARCH)
TOP = 6
BEGIN, END = "<!-- features, written by afd bench amd -->", "<!-- /features -->"


@dataclass(frozen=True)
class Feature:
    """One row. gfx942, gfx950: rungs reached without hardware. steps: of the ladder that raise it
    to 6 together; none: the ladder cannot."""

    name: str
    file: str
    gfx942: tuple[int, ...]
    gfx950: tuple[int, ...]
    note: str
    steps: tuple[str, ...]

    def rungs(self, arch: str, results: Sequence[Result]) -> tuple[int, ...]:
        """All rungs on one architecture; 6 if one result passed all of its steps there."""
        seen: tuple[int, ...] = {"gfx942": self.gfx942, "gfx950": self.gfx950}[arch]
        return (*seen, TOP) if self.verified_on(arch, results) else seen

    def verified_on(self, arch: str, results: Sequence[Result]) -> str | None:
        """Day of the first result that verifies the feature on an architecture."""
        if not self.steps:
            return None
        days = [
            result.date
            for result in results
            if result.arch == arch and set(self.steps) <= result.passed
        ]
        return min(days, default=None)


def read_features(path: Path = FILE) -> tuple[Feature, ...]:
    rows = json.loads(path.read_text(encoding="utf-8"))["features"]
    keys = ("gfx942", "gfx950", "steps")
    return tuple(Feature(**{**row, **{key: tuple(row[key]) for key in keys}}) for row in rows)


def table(features: Sequence[Feature], results: Sequence[Result]) -> str:
    """The table of docs/amd.md."""
    lines = [
        "| feature | file | gfx942 (MI300X, MI325X) | gfx950 (MI350X, MI355X) | seen | rung 6 |",
        "|---|---|---|---|---|---|",
    ]
    for feature in features:
        cells = []
        for arch in ARCHS:
            day = feature.verified_on(arch, results)
            rungs = ", ".join(map(str, feature.rungs(arch, results))) or "none"
            cells.append(f"{rungs} ({day})" if day else rungs)
        link = f"[{Path(feature.file).name}](../{feature.file})"
        where = " | ".join(
            [feature.name, link, *cells, feature.note, ", ".join(feature.steps) or "no step"]
        )
        lines.append(f"| {where} |")
    return "\n".join(lines)


def insert(page: str, text: str) -> str:
    """The page with its generated part replaced. Raises ValueError if it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no part between {BEGIN} and {END}")
    return f"{before}{BEGIN}\n\n{text}\n\n{END}{after}"


def records(
    features: Sequence[Feature], results: Sequence[Result], machine: str, date: str
) -> list[Record]:
    """One record per feature and architecture: its highest rung, compared with 6."""
    made = []
    for feature in features:
        for arch in ARCHS:
            rung = max(feature.rungs(arch, results), default=0)
            made.append(
                Record(
                    "amd",
                    f"{feature.name}, {arch}",
                    "rung",
                    rung,
                    "rung",
                    "hardware",
                    TOP,
                    rung / TOP,
                    machine,
                    "afd bench amd",
                    date,
                )
            )
    return made
