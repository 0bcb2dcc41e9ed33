"""Fetches the packages of training/sources.py and writes their prose: `python -m training.corpus`.

Output in DIRECTORY: `prose.jsonl` and `fresh.jsonl` (SOURCES and FRESH), with one {"source",
"title", "paragraphs", "weight"} per line, and `corpus.json` with package, version, licence and size
of each source. The same package versions give the same files.
"""

import argparse
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from training.clean import prose
from training.readers import READERS, Document
from training.sources import FRESH, SOURCES, WORDNET, Source


def unpack(source: Source, cache: Path) -> Path:
    """Downloads and unpacks a package once; returns its root folder.

    Raises:
        RuntimeError: apt-get or dpkg is missing or fails. The message names the package.
    """
    target = cache / "unpacked" / source.package
    if target.is_dir():
        return target
    packages = cache / "packages"
    packages.mkdir(parents=True, exist_ok=True)
    found = sorted(packages.glob(f"{source.package}_*.deb"))
    target.parent.mkdir(exist_ok=True)
    try:
        if not found:
            subprocess.run(["apt-get", "-q", "download", source.package], cwd=packages, check=True)
            found = sorted(packages.glob(f"{source.package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(found[-1]), str(target)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError(
            f"the Debian package {source.package} could not be fetched and unpacked ({error}); "
            "use Debian 12 and run apt-get update first"
        ) from None
    return target


def version(source: Source, cache: Path) -> str:
    """Returns the version of a downloaded package, from its file name."""
    (name,) = sorted((cache / "packages").glob(f"{source.package}_*.deb"))[-1:]
    return name.name.split("_")[1].replace("%3a", ":")


def documents(source: Source, cache: Path) -> Iterator[Document]:
    """Yields the cleaned documents of one source that contain prose."""
    for document in READERS[source.reader](unpack(source, cache) / source.root, source.glob):
        kept = prose(document.paragraphs)
        if kept:
            yield Document(document.title, tuple(kept))


def unique(found: Iterator[Document], seen: set[bytes]) -> Iterator[Document]:
    """Yields the documents without paragraphs in ``seen`` (repeated boilerplate); updates it."""
    for document in found:
        fresh = []
        for text in document.paragraphs:
            digest = hashlib.blake2b(text.encode(), digest_size=12).digest()
            if digest not in seen:
                seen.add(digest)
                fresh.append(text)
        if fresh:
            yield Document(document.title, tuple(fresh))


def build(cache: Path, out: Path) -> list[dict[str, object]]:
    """Writes the three files to `out` and returns the table of corpus.json."""
    out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    table: list[dict[str, object]] = []
    for name, sources in (("prose.jsonl", SOURCES), ("fresh.jsonl", FRESH)):
        with (out / name).open("w") as stream:
            table += [_write(source, cache, stream, seen) for source in sources]
    unpack(WORDNET, cache)
    table.append(_row(WORDNET, cache, 0, 0))
    (out / "corpus.json").write_text(json.dumps(table, indent=1) + "\n")
    return table


def _write(source: Source, cache: Path, stream: TextIO, seen: set[bytes]) -> dict[str, object]:
    """Writes the documents of one source and returns its row of the table."""
    characters = count = 0
    for document in unique(documents(source, cache), seen):
        record = {
            "source": source.package,
            "title": document.title,
            "paragraphs": document.paragraphs,
            "weight": source.weight,
        }
        stream.write(json.dumps(record) + "\n")
        characters += sum(map(len, document.paragraphs))
        count += 1
    print(f"{source.title}: {count} documents, {characters / 1e6:.2f} M characters")
    return _row(source, cache, count, characters)


def _row(source: Source, cache: Path, count: int, characters: int) -> dict[str, object]:
    return {
        "package": source.package,
        "version": version(source, cache),
        "licence": source.licence,
        "title": source.title,
        "documents": count,
        "characters": characters,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Fetch and clean the training text.")
    parser.add_argument("directory", type=Path, help="folder of packages and text")
    args = parser.parse_args()
    table = build(args.directory, args.directory)
    total = sum(int(str(row["characters"])) for row in table)
    print(f"{total / 1e6:.1f} M characters of prose in {args.directory / 'prose.jsonl'}")


if __name__ == "__main__":
    main()
