"""Selects English prose and normalises it."""

import re

_SPACE = re.compile(r"\s+")
_REPLACED = str.maketrans({
    "“": '"', "”": '"', "‘": "'", "’": "'", "´": "'", "–": "-", "—": " - ", "…": "...",
    "\u00a0": " ", "¶": " ", "\u200b": "", "\ufeff": "",
})  # fmt: skip
_MARKS = re.compile(r"(?<!\w)_([^_]+)_(?!\w)|[{}]|\[\d+\]")
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
_COMMON = frozenset(
    re.split(
        " ",
        "the of and to a in is that it was for on with as be by he his i at this not are or you "
        "from but have had her she they we an which all will there if my been one so no their "
        "were said can has when who would what your could more into only do than its any may "
        "then me",
    )
)
MIN_CHARACTERS, MAX_CHARACTERS = 60, 3000
MIN_WORDS = 10
MIN_LETTERS = 0.92  # share of letters, spaces, commas, periods, quotes
MIN_COMMON = 0.22  # share of words that are among the most common ones
_CODE = re.compile(r"[\w.]+\(\)|\w+_\w+|\w+::\w+|--\w+|\w+[a-z][A-Z]\w+|[<>|\\=$@~^*#]")
MAX_CODE = 0.06  # code-like tokens per word


def normalise(text: str) -> str:
    """Returns the text as one line with plain quotes and dashes, without markup and footnotes."""
    text = _MARKS.sub(lambda found: found.group(1) or "", text.translate(_REPLACED))
    return _SPACE.sub(" ", text).strip()


def is_prose(text: str) -> bool:
    """Returns whether a normalised paragraph is English sentences, not code or a table."""
    if not MIN_CHARACTERS <= len(text) <= MAX_CHARACTERS or not text.isascii():
        return False
    if text[-1] not in ".!?:\"')" or not (text[0].isupper() or text[0] in "\"'("):
        return False
    words = _WORD.findall(text)
    if len(words) < MIN_WORDS:
        return False
    letters = sum(char.isalpha() or char in " ,.'\"" for char in text)
    common = sum(word.lower() in _COMMON for word in words)
    return (
        letters >= MIN_LETTERS * len(text)
        and common >= MIN_COMMON * len(words)
        and len(_CODE.findall(text)) <= MAX_CODE * len(words)
    )


def prose(paragraphs: tuple[str, ...]) -> list[str]:
    """Returns the paragraphs that are prose, normalised, in order."""
    return [text for text in map(normalise, paragraphs) if is_prose(text)]
