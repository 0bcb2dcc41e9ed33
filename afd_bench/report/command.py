"""`afd bench report [--check]`: renders the README's table and the result pages from records.

Lists the records whose code has changed since they were measured. With --check nothing is written:
exit status 1 if a page differs from its records, or if the README shows a number that no record
holds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from afd.errors import ConfigError
from afd.records import Record, read_records
from afd_bench.report import pages, readme
from afd_bench.report.sources import Checkout

OWN_RENDERER = {"eval.md", "paper.md", "planner.md"}
"""Pages that a benchmark writes whole; tests compare them with their records."""


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, or 1 where --check finds a difference. Raises ConfigError, AfdError."""
    parser = argparse.ArgumentParser(
        prog="afd bench report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail on a difference")
    parser.add_argument("--root", type=Path, default=Path.cwd(), help="a checkout (default: here)")
    args = parser.parse_args(argv)
    root: Path = args.root
    if not (root / "docs" / "results").is_dir():
        raise ConfigError(f"{root} has no docs/results; run afd bench report in a checkout")
    checkout = Checkout(root)
    wanted = rendered(root, checkout, ages=not args.check)
    differing = [path for path, text in wanted.items() if _read(path) != text]
    problems = [f"{path.relative_to(root)} differs from its records" for path in differing]
    problems += [
        f"README.md shows {number!r}, which no record holds"
        for number in readme.unrecorded(_read(root / "README.md"))
    ]
    if not args.check:
        for path in differing:
            path.write_text(wanted[path], encoding="utf-8")
            print(f"{path.relative_to(root)} written")
        problems = problems[len(differing) :]
    for problem in problems:
        print(f"{problem}; run afd bench report, or remove the number")
    return 1 if problems else 0


def rendered(root: Path, checkout: Checkout, *, ages: bool) -> dict[Path, str]:
    """What each page should be, by path.

    ages: whether the list of results (docs/results/README.md), which says how old records are, is
    among them: it changes with every commit, so a check leaves it out.
    """
    folder = root / "docs" / "results"
    found: dict[str, Sequence[Record]] = {
        path.name: read_records(path) for path in sorted(folder.glob("*.json"))
    }
    start = root / "README.md"
    wanted = {start: readme.insert(_read(start), readme.table(readme.ROWS, found))}
    listed = []
    for name, records in found.items():
        page = folder / f"{Path(name).stem}.md"
        if page.exists():
            listed.append((page.name, name, records))
            if page.name not in OWN_RENDERER:
                wanted[page] = pages.insert(_read(page), pages.section(name, records))
    if ages:
        wanted[folder / "README.md"] = pages.index(listed, checkout)
    return wanted


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
