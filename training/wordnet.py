"""Reads WordNet's database files into words, senses and relations.

Format: WordNet 3.0 manual, wndb(5WN). Reads only what the generated conversations use.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path

POS = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}
_COARSE = re.compile(
    r"slur|offensive|obscene|vulgar|disparag|derogat|sexual|genital|prostitut|copulat|feces|rape\b|suicide"
)
_MARKER = re.compile(r"\([a-z]+\)$")  # syntactic marker of adjectives: (p), (a), (ip)


@dataclass(frozen=True)
class Sense:
    """One meaning. `words`: its lemmas. `kinds_of`, `kinds`: more general, more special senses."""

    key: tuple[str, str]  # part of speech (n v a r), offset
    words: tuple[str, ...]
    definition: str
    examples: tuple[str, ...]
    kinds_of: tuple[tuple[str, str], ...] = ()
    kinds: tuple[tuple[str, str], ...] = ()
    opposites: tuple[tuple[int, tuple[str, str], int], ...] = ()  # my word, sense, its word
    instance: bool = False  # a name: a person, a place
    coarse: bool = False  # an insult or a sexual matter: not for a demonstration


@dataclass
class WordNet:
    senses: dict[tuple[str, str], Sense] = field(default_factory=dict)
    # (part of speech, word) -> senses, the most frequent first
    index: dict[tuple[str, str], list[tuple[str, str]]] = field(default_factory=dict)
    # how often a word occurs in WordNet's tagged texts; absent: never
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    # common words whose first sense has an opposite
    opposed: list[tuple[str, str]] = field(default_factory=list)

    def first(self, pos: str, word: str) -> Sense | None:
        keys = self.index.get((pos, word))
        return self.senses[keys[0]] if keys else None

    def ancestors(self, sense: Sense) -> list[Sense]:
        """Returns the more general senses, nearest first, along the first relation of each."""
        found: list[Sense] = []
        while sense.kinds_of and len(found) < 12:
            sense = self.senses[sense.kinds_of[0]]
            found.append(sense)
        return found


def split_gloss(gloss: str) -> tuple[str, tuple[str, ...]]:
    """Returns definition and example sentences of a gloss."""
    examples = tuple(e.strip(" ;,") for e in re.findall(r'"([^"]+)"', gloss))
    definition = gloss.split('"')[0].strip(" ;:")
    definition = re.sub(r"^\([^)]*\)\s*", "", definition)
    return definition.split(";")[0].strip(), examples


def parse_line(line: str) -> Sense:
    """Parses one line of a data file."""
    head, _, gloss = line.partition(" | ")
    fields = head.split()
    pos = "a" if fields[2] == "s" else fields[2]
    count = int(fields[3], 16)
    words = tuple(_MARKER.sub("", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2])
    at = 4 + 2 * count
    above, below, opposite = [], [], []
    instance = False
    for i in range(int(fields[at])):
        symbol, offset, other, ends = fields[at + 1 + 4 * i : at + 5 + 4 * i]
        key = ("a" if other == "s" else other, offset)
        if symbol in ("@", "@i"):
            above.append(key)
            instance = instance or symbol == "@i"
        elif symbol == "~":
            below.append(key)
        elif symbol == "!":
            opposite.append((int(ends[:2], 16) - 1, key, int(ends[2:], 16) - 1))
    definition, examples = split_gloss(gloss.strip())
    return Sense(
        (pos, fields[0]), words, definition, examples,
        tuple(above), tuple(below), tuple(opposite), instance, bool(_COARSE.search(gloss)),
    )  # fmt: skip


def read(folder: Path) -> WordNet:
    """Reads the whole database, about 117,000 senses, in a few seconds."""
    net = WordNet()
    for pos, name in POS.items():
        for line in (folder / f"data.{name}").read_text("latin-1").splitlines():
            if line[:1] != " ":
                sense = parse_line(line)
                net.senses[sense.key] = sense
        for line in (folder / f"index.{name}").read_text("latin-1").splitlines():
            if line[:1] == " ":
                continue
            fields = line.split()
            word = fields[0].replace("_", " ")
            offsets = fields[-int(fields[2]) :]
            net.index[pos, word] = [(pos, offset) for offset in offsets]
    for line in (folder / "cntlist.rev").read_text("latin-1").splitlines():
        sense_key, _, count = line.split()
        lemma, _, rest = sense_key.partition("%")
        key = ("_nvara"[int(rest[0])], lemma.replace("_", " "))
        net.counts[key] = net.counts.get(key, 0) + int(count)
    net.opposed = [
        key for key in sorted(net.counts)
        if key in net.index and net.senses[net.index[key][0]].opposites
    ]  # fmt: skip
    return net


CATEGORIES = (
    "animal", "fruit", "vegetable", "vehicle", "tool", "garment", "furniture", "musical instrument",
    "tree", "flower", "dish", "beverage", "metal", "gem", "building", "boat", "weapon", "game",
    "worker", "scientist", "mountain", "weather", "color", "science", "disease", "bird", "toy",
)  # fmt: skip


def familiar(net: WordNet) -> dict[tuple[str, str], float]:
    """Returns the words to ask about, with weights.

    The weight is the square root of the count for words in the tagged texts, and 1 for short names
    of things in CATEGORIES. Coarse and empty senses are omitted.
    """
    weights: dict[tuple[str, str], float] = {}
    roots = {net.index["n", name][0] for name in CATEGORIES}
    for key in sorted(net.index):
        sense = net.first(*key)
        pos, word = key
        if sense is None or sense.coarse or not sense.definition or len(word) < 3:
            continue
        if key in net.counts:
            weights[key] = net.counts[key] ** 0.5
        elif (
            pos == "n" and word.isalpha() and len(word) < 10 and word in sense.words
            and len(sense.definition) < 100
            and any(above.key in roots for above in net.ancestors(sense))
        ):  # fmt: skip
            weights[key] = 1.0
    return weights
