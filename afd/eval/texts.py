"""Held-out texts, and the windows in which a server reads them. Pure but for reading files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.bench.agreement import Forced
from afd.errors import ConfigError

_SEPARATOR = "---"
_HELDOUT = "heldout*.txt"


@dataclass(frozen=True)
class Text:
    """A named text; its documents have nothing to do with each other."""

    name: str
    documents: tuple[str, ...]


def read_texts(model: Path, files: Sequence[Path]) -> list[Text]:
    """The given files, or the model folder's ``heldout*.txt`` where none are given.

    Raises:
        ConfigError: a file cannot be read or is empty, or the model has no held-out text.
    """
    paths = list(files) or sorted(model.glob(_HELDOUT))
    if not paths:
        raise ConfigError(
            f"{model} has no {_HELDOUT} beside its weights; give a text that the model was not"
            " trained on with --text FILE"
        )
    texts = []
    for path in paths:
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as err:
            raise ConfigError(f"cannot read the text {path}: {err}") from None
        documents = split_documents(content)
        if not documents:
            raise ConfigError(f"the text {path} is empty; give one with --text FILE")
        texts.append(Text(path.stem, documents))
    return texts


def split_documents(content: str) -> tuple[str, ...]:
    """The parts between lines of ``---``, without blank ones."""
    documents: list[list[str]] = [[]]
    for line in content.splitlines():
        if line.strip() == _SEPARATOR:
            documents.append([])
        else:
            documents[-1].append(line)
    joined = ("\n".join(lines).strip() for lines in documents)
    return tuple(document for document in joined if document)


def windows(tokens: Sequence[int], size: int, stride: int) -> list[Forced]:
    """Cut one document so that every token but the first is scored exactly once.

    The first window scores all of its tokens but the very first one, which nothing comes before.
    Each later one scores its last ``stride`` tokens (fewer at the end of the document), after
    ``size - stride`` tokens or more of context.

    Args:
        size: tokens of a window. stride: from one window's end to the next one's, less than
            ``size``: a window's first token has nothing before it, and so no probability.
    """
    if not 1 <= stride < size:
        raise ValueError(f"a window of {size} tokens cannot move by {stride}")
    found = []
    scored = 1
    while scored < len(tokens):
        end = min(len(tokens), size if scored == 1 else scored + stride)
        start = max(0, end - size)
        found.append(Forced(tuple(tokens[start:scored]), tuple(tokens[scored:end])))
        scored = end
    return found


def spread(choices: Sequence[Forced], tokens: int) -> list[Forced]:
    """Evenly spaced windows that score about ``tokens`` tokens together; all where that is less."""
    total = sum(len(window.continuation) for window in choices)
    if total <= tokens:
        return list(choices)
    found = []
    seen = taken = 0
    for window in choices:
        # Takes a window whenever the share taken so far lags behind the share walked past.
        if taken * total <= seen * tokens:
            found.append(window)
            taken += len(window.continuation)
        seen += len(window.continuation)
    return found
