"""The reading list of docs/architecture.md follows a token in a few short files."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MOST_FILES = 8
MOST_LINES = 2_000
ROW = re.compile(
    r"^\| \d+ \| \[(?P<path>[^]]+)\]\(\.\./(?P<link>[^)]+)\) \| (?P<lines>\d+) \|", re.M
)


def reading_list():
    """Returns (path, number of lines that the page states) of each file."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    _, _, rest = page.partition("\n## Reading list\n")
    section, _, _ = rest.partition("\n## ")
    found = [(row["path"], row["link"], int(row["lines"])) for row in ROW.finditer(section)]
    assert found, "docs/architecture.md has no reading list"
    assert all(path == link for path, link, _ in found)
    return [(path, lines) for path, _, lines in found]


def lines_of(path):
    return len((ROOT / path).read_text().splitlines())


def test_the_list_comes_first():
    headings = re.findall(r"^## (.*)$", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    assert headings[0] == "Reading list"


def test_the_files_exist_and_are_few_and_short():
    files = [path for path, _ in reading_list()]
    assert [path for path in files if not (ROOT / path).is_file()] == []
    assert len(set(files)) == len(files) <= MOST_FILES
    assert sum(lines_of(path) for path in files) <= MOST_LINES


def test_the_list_covers_both_sides():
    rooms = {path.split("/")[0] for path, _ in reading_list()}
    assert {"attention_worker", "ffn_worker"} <= rooms


def test_the_stated_lines_are_about_right():
    wrong = {
        path: (stated, lines_of(path))
        for path, stated in reading_list()
        if abs(stated - lines_of(path)) > max(20, 0.2 * stated)
    }
    assert not wrong, f"docs/architecture.md states wrong line counts (stated, actual): {wrong}"
