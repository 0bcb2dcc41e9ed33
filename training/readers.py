"""Readers of the packages' formats. Each yields documents: a title and uncleaned paragraphs.

A reader parses a file or folder. training/clean.py decides what is prose.
"""

import gzip
import html
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Document:
    title: str
    paragraphs: tuple[str, ...]


_DROPPED = re.compile(
    r"<(script|style|pre|nav|table|head|button|form|svg|footer|summary)\b.*?</\1\s*>",
    re.S | re.I,
)
_COMMENT = re.compile(r"<!--.*?-->", re.S)
_BLOCK = re.compile(
    r"</?(?:p|li|dd|dt|dl|ul|ol|div|section|article|h[1-6]|td|tr|blockquote|br|hr|aside|main|body"
    r"|details|figure)\b[^>]*>",
    re.I,
)
_TAG = re.compile(r"<[^>]*>")
_TITLE = re.compile(r"<title[^>]*>(.*?)</title>", re.S | re.I)
_HEAD_SEPARATOR = re.compile(r"\s+(?:[-|—–]|::)\s+")
_PARAGRAPHS_PER_DOCUMENT = 400


def html_text(page: str) -> Document:
    """Returns title and block-level texts of one HTML page, without tags and entities."""
    found = _TITLE.search(page)
    title = html.unescape(_TAG.sub("", found.group(1))) if found else ""
    body = _COMMENT.sub("", _DROPPED.sub("\n", page))
    blocks = (html.unescape(_TAG.sub("", block)) for block in _BLOCK.split(body))
    return Document(_HEAD_SEPARATOR.split(title.strip())[0], tuple(b for b in blocks if b.strip()))


def read_html(root: Path, glob: str) -> Iterator[Document]:
    for file in sorted(root.glob(glob)):
        if file.is_file():
            yield html_text(file.read_text("utf-8", errors="replace"))


def read_plain(root: Path, glob: str) -> Iterator[Document]:
    """A text file, or a dictd file (gzip), with blank lines between paragraphs."""
    data = root.read_bytes()
    if root.suffix == ".dz":
        data = gzip.decompress(data)
    yield from _chunks(root.stem, re.split(r"\n\s*\n", data.decode("utf-8", errors="replace")))


_GUTENBERG_EDGE = re.compile(
    r"^.*(?:\*\*\* ?(?:START|END) OF|End of (?:the )?Project Gutenberg).*$", re.M | re.I
)


def read_gutenberg(root: Path, glob: str) -> Iterator[Document]:
    """A book of Project Gutenberg without its header and footer."""
    text = root.read_text("utf-8", errors="replace").replace("\r\n", "\n")
    book = max(_GUTENBERG_EDGE.split(text), key=len)
    yield from _chunks(root.stem, re.split(r"\n\s*\n", book))


def read_sword(root: Path, glob: str) -> Iterator[Document]:
    """A SWORD zText module: zlib-compressed OSIS blocks, located by the index .bzs."""
    for testament in ("ot", "nt"):
        blocks = (root / f"{testament}.bzs").read_bytes()
        packed = (root / f"{testament}.bzz").read_bytes()
        for start in range(0, len(blocks) - 11, 12):
            offset, size, _ = struct.unpack_from("<III", blocks, start)
            text = zlib.decompress(packed[offset : offset + size]).decode("utf-8", "replace")
            yield from _chunks("Bible", osis_paragraphs(text))


_NOTE = re.compile(r"<(note|title)\b.*?</\1>", re.S)
_OSIS_BREAK = re.compile(r"<(?:div|p|lg|/p|/lg|milestone|chapter)\b[^>]*>")


def osis_paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of an OSIS fragment, without notes and headings."""
    broken = _OSIS_BREAK.sub("\n\n", _NOTE.sub("", text))
    return re.split(r"\n\s*\n", html.unescape(_TAG.sub(" ", broken)))


def read_austen(root: Path, glob: str) -> Iterator[Document]:
    """R's lazy-load database: per object a big-endian length and zlib data in XDR format.

    The novels are character vectors of lines. A string is the type word 0x00040009 or 0x00000009
    (CHARSXP), a length, and its bytes. Source: R Internals, "Serialization Formats".
    """
    data, at = root.read_bytes(), 0
    while at < len(data):
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(data[at + 4 :])
        at = len(data) - len(unpacker.unused_data)
        lines = list(xdr_strings(text))
        if len(lines) > 1000:
            yield from _chunks("Jane Austen", re.split(r"\n\s*\n", "\n".join(lines)))


def xdr_strings(data: bytes) -> Iterator[str]:
    """Yields the strings of a serialised R character vector, in order."""
    for found in re.finditer(rb"\x00[\x00\x04]\x00\x09", data):
        (length,) = (
            struct.unpack_from(">i", data, found.end()) if found.end() + 4 <= len(data) else (-1,)
        )
        if 0 <= length < 4000:
            start = found.end() + 4
            yield data[start : start + length].decode("utf-8", "replace")


def _chunks(title: str, paragraphs: list[str]) -> Iterator[Document]:
    for start in range(0, len(paragraphs), _PARAGRAPHS_PER_DOCUMENT):
        yield Document(title, tuple(paragraphs[start : start + _PARAGRAPHS_PER_DOCUMENT]))


READERS: dict[str, Callable[[Path, str], Iterator[Document]]] = {
    "html": read_html,
    "plain": read_plain,
    "gutenberg": read_gutenberg,
    "sword": read_sword,
    "austen": read_austen,
}
