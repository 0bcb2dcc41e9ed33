"""Makes a few-shot multiple-choice task from any text: which words continue this passage? Pure.

An item shows a few complete passages and the first words of another passage. The options are that
passage's next words and the words at the same place in other passages. Options are scored by
log-likelihood, as in EleutherAI's lm-evaluation-harness (``multiple_choice``, metric ``acc``). A
random choice is correct in 1 of 4 items.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

CONTEXT_WORDS = 16
OPTION_WORDS = 4
OPTIONS = 4
SHOTS = 2
_WORDS = CONTEXT_WORDS + OPTION_WORDS
_MARKUP = ("<|", "{", "`")  # of chat templates and tool calls, whose format reveals the answer


@dataclass(frozen=True)
class Item:
    """One item. context: ends before a space. options: begin with it. answer: correct index."""

    context: str
    options: tuple[str, ...]
    answer: int


def items(documents: Sequence[str], count: int, *, seed: int = 1) -> list[Item]:
    """Returns at most ``count`` items, determined by the documents and the seed.

    Returns [] if the text has too few long paragraphs.
    """
    draw = random.Random(seed)
    found = passages(documents)
    draw.shuffle(found)
    shown, asked = found[:SHOTS], found[SHOTS:]
    if len({_ending(words) for words in asked}) < OPTIONS:
        return []
    shots = "".join(" ".join(words) + "\n\n" for words in shown)
    return [_item(words, asked, shots, draw) for words in asked[:count]]


def passages(documents: Sequence[str]) -> list[tuple[str, ...]]:
    """Returns the first words of every paragraph that is long enough and has no markup, once."""
    found: dict[tuple[str, ...], None] = {}
    for document in documents:
        for paragraph in document.split("\n\n"):
            words = tuple(paragraph.split()[:_WORDS])
            if len(words) == _WORDS and not any(mark in w for w in words for mark in _MARKUP):
                found[words] = None
    return list(found)


def choice(logprobs: Sequence[float]) -> int:
    """Returns the index of the most likely option; the first of equal ones."""
    return max(range(len(logprobs)), key=lambda index: logprobs[index])


def _item(
    words: tuple[str, ...], pool: Sequence[tuple[str, ...]], shots: str, draw: random.Random
) -> Item:
    true = _ending(words)
    others = sorted({_ending(other) for other in pool} - {true})
    options = [true, *draw.sample(others, OPTIONS - 1)]
    draw.shuffle(options)
    return Item(shots + " ".join(words[:CONTEXT_WORDS]), tuple(options), options.index(true))


def _ending(words: tuple[str, ...]) -> str:
    return " " + " ".join(words[CONTEXT_WORDS:])
