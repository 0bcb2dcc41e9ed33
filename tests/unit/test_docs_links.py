"""Every relative link in a Markdown page leads to an existing file, and its anchor to a heading."""

import re
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]

FENCE = re.compile(r"^ {0,3}(```+|~~~+).*?^ {0,3}\1[^\n]*$", re.M | re.S)
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.S)
LINK = re.compile(r"\]\(\s*<?(?P<target>[^\s)>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^ {0,3}\[[^\]^]+\]:\s+<?(?P<target>\S+?)>?\s*$", re.M)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(?P<text>.+?)[ \t]*#*[ \t]*$", re.M)
HTML_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^(?:[a-zA-Z][a-zA-Z0-9+.-]*:|//)")


@cache
def tracked() -> frozenset[str]:
    """Returns the paths of all files that git tracks or would add, relative to the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
    except FileNotFoundError:
        pytest.skip("git is not installed")
    if done.returncode != 0:
        pytest.skip("this is not a git checkout")
    return frozenset(path for path in done.stdout.split("\0") if (ROOT / path).is_file())


def pages() -> list[str]:
    return sorted(path for path in tracked() if path.endswith(".md"))


def slug(heading: str) -> str:
    """Returns the anchor that GitHub gives a heading."""
    text = re.sub(r"!?\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(text: str) -> set[str]:
    """Returns all anchors of a page. Equal headings are numbered, as on GitHub."""
    found: set[str] = set()
    plain = FENCE.sub("", text)
    for match in HEADING.finditer(plain):
        base = name = slug(match["text"])
        count = 0
        while name in found:
            count += 1
            name = f"{base}-{count}"
        found.add(name)
    return found | set(HTML_ANCHOR.findall(plain))


def links(text: str) -> list[str]:
    """Returns the targets of all links outside of code."""
    paragraphs = FENCE.sub("", text).split("\n\n")
    plain = "\n\n".join(CODE.sub("`code`", paragraph) for paragraph in paragraphs)
    return [match["target"] for kind in (LINK, REFERENCE) for match in kind.finditer(plain)]


@cache
def anchors_of(path: Path) -> frozenset[str]:
    return frozenset(anchors(path.read_text()))


def fault(page: Path, target: str) -> str | None:
    """Returns what is wrong with a link of this page, or None."""
    if ELSEWHERE.match(target):
        return None
    name, _, anchor = unquote(target).partition("#")
    path = (page.parent / name).resolve() if name else page
    if not path.is_relative_to(ROOT):
        return "leads out of the repository"
    inside = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        if not any(known.startswith(f"{inside}/") for known in tracked()):
            return "folder has no tracked file"
    elif inside not in tracked():
        return "no such tracked file"
    if anchor and path.suffix == ".md" and anchor not in anchors_of(path):
        return f"{inside} has no heading #{anchor}"
    return None


def test_every_relative_link_leads_somewhere() -> None:
    assert pages()
    wrong = []
    for name in pages():
        page = ROOT / name
        for target in links(page.read_text()):
            reason = fault(page, target)
            if reason:
                wrong.append(f"{name}: {target}: {reason}")
    assert not wrong, "\n" + "\n".join(wrong)


def test_the_index_lists_every_page() -> None:
    """docs/README.md links every page of docs/, except those in subfolders (results, lab)."""
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / target).resolve() for target in links(index.read_text())}
    expected = {ROOT / name for name in pages() if Path(name).parent.as_posix() == "docs"} - {index}
    assert sorted(path.name for path in expected - listed) == []


def test_the_checker_finds_broken_links() -> None:
    text = "# A `b_c`, (d)\n\n## Same\n\n## Same\n\n```\n# no [heading](x.md)\n```\n`[c](y.md)`\n"
    assert anchors(text) == {"a-b_c-d", "same", "same-1"}
    assert links(text) == []
    assert links("[a\nb](q.md#x) ![p](i.svg)\n\n[r]: s.md\n") == ["q.md#x", "i.svg", "s.md"]
    assert links("a ` b\n\n[![p](i.svg)](p.md) `") == ["i.svg", "p.md"]
    readme = ROOT / "README.md"
    assert fault(readme, "https://example.org/x") is None
    assert fault(readme, "docs/README.md") is None
    assert fault(readme, "docs") is None
    assert fault(readme, "docs/none.md") == "no such tracked file"
    assert fault(readme, "docs/README.md#none") == "docs/README.md has no heading #none"
    assert fault(readme, "../x") == "leads out of the repository"
