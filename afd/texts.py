"""Held-out texts, and the windows over which a model is scored on them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.errors import ConfigError

_SEPARATOR = "---"
_HELDOUT = "heldout*.txt"


@dataclass(frozen=True)
class Forced:
    """A prompt and the continuation over which a model is scored; token ids."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A named text of independent documents."""

    name: str
    documents: tuple[str, ...]


def read_texts(model: Path, files: Sequence[Path]) -> list[Text]:
    """Returns the texts of ``files``, or of the model folder's ``heldout*.txt`` if it is empty.

    Raises:
        ConfigError: A file cannot be read or is empty, or the model has no held-out text.
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
    """Returns the parts between lines of ``---``, without empty ones."""
    documents: list[list[str]] = [[]]
    for line in content.splitlines():
        if line.strip() == _SEPARATOR:
            documents.append([])
        else:
            documents[-1].append(line)
    joined = ("\n".join(lines).strip() for lines in documents)
    return tuple(document for document in joined if document)


def windows(tokens: Sequence[int], size: int, stride: int) -> list[Forced]:
    """Cuts one document into windows so that every token except the first is scored once.

    The first window scores all its tokens except the first, which has no context. Each later window
    scores its last ``stride`` tokens (fewer at the end of the document), after at least
    ``size - stride`` tokens of context.

    Args:
        size: Tokens per window.
        stride: Distance between the ends of two windows, less than ``size`` because the first token
            of a window has no context.
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
    """Returns evenly spaced windows that score about ``tokens`` tokens; all if there are fewer."""
    total = sum(len(window.continuation) for window in choices)
    if total <= tokens:
        return list(choices)
    found = []
    seen = taken = 0
    for window in choices:
        # Takes a window whenever the share taken so far lags behind the share seen.
        if taken * total <= seen * tokens:
            found.append(window)
            taken += len(window.continuation)
        seen += len(window.continuation)
    return found
