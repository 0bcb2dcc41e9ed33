# ruff: noqa: E501 (long sentences)
"""Questions about words with answers from WordNet: meanings, examples, kinds, opposites."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from training.stories import article
from training.wordnet import Sense, WordNet

Turn = tuple[str, str]  # question, answer
MAX_ANSWER = 400


def starts_with_article(text: str) -> bool:
    return text.split(" ", 1)[0] in ("a", "an", "the", "any", "one", "someone", "something", "some")


def noun_phrase(word: str) -> str:
    """Returns the word with its article; names and words that look plural get none."""
    if word[:1].isupper() or (word.endswith("s") and not word.endswith("ss")):
        return word
    return f"{article(word)} {word}"


def sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text[-1:] in ".!?" else ".")


def define(sense: Sense, word: str) -> str:
    """Returns a full sentence with the meaning of the word."""
    pos, definition = sense.key[0], sense.definition
    if pos == "n" and starts_with_article(definition):
        return sentence(f"{noun_phrase(word)} is {definition}")
    if pos == "n":
        return sentence(f"{word} is {definition}")
    if pos == "v":
        return sentence(f"to {word} means to {definition}")
    if pos == "a":
        return sentence(f'"{word}" means {definition}').replace('""', '"')
    return sentence(f'"{word}" means {definition}')


def listing(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def meaning(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn:
    name = noun_phrase(word)
    ways = {
        "n": (f"What is {name}?", f"What is {name}?", f"What does {word} mean?", f"Define {word}.",
              f"What does the word {word} mean?", f"Explain {word}.", f"Tell me about {word}.",
              f"Tell me about the {word}.", f"Tell me something about {name}.", f"What is the {word}?",
              f"What are {word}s?", f"Tell me about {word}s.",
              f"Do you know what {name} is?", f"what is {word}", f"Can you explain what {name} is?"),
        "v": (f"What does it mean to {word}?", f"What does {word} mean?", f"Define {word}.",
              f"What does the verb {word} mean?", f"Explain the word {word}."),
    }.get(pos, (f"What does {word} mean?", f"Define {word}.", f"What does the word {word} mean?",
                f"Explain the word {word}."))  # fmt: skip
    answer = define(sense, word)
    above = net.ancestors(sense)
    extra = []
    if shown := [e for e in sense.examples if word[:4].lower() in e.lower()]:
        extra.append(f'For example: "{shown[0]}"' + ("" if shown[0][-1:] in ".!?" else "."))
    if pos == "n" and above and word not in above[0].words and not sense.instance:
        extra.append(f"It is a kind of {above[0].words[0]}.")
    others = [w for w in sense.words if w.lower() != word.lower()]
    if others:
        extra.append(f"Another word for it is {others[0]}.")
    if pos == "n" and len(sense.kinds) >= 3:
        kinds = [net.senses[k].words[0] for k in sense.kinds[:40]]
        extra.append(f"Some kinds of it are {listing(random.sample(kinds, 3))}.")
    if extra and random.random() < 0.5:
        random.shuffle(extra)
        answer += " " + " ".join(extra[: random.choice((1, 1, 2))])
    return random.choice(ways), answer


def example(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn | None:
    fitting = [e for e in sense.examples if word.lower() in e.lower() and len(e.split()) > 3]
    if not fitting:
        return None
    ways = (
        f"Use {word} in a sentence.",
        f"Use the word {word} in a sentence.",
        f"Give me an example of the word {word}.",
        f"Write a sentence with the word {word}.",
    )
    return random.choice(ways), sentence(random.choice(fitting))


def synonym(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn | None:
    others = [w for w in sense.words if w.lower() != word.lower()]
    if not others:
        return None
    ways = (
        f"What is another word for {word}?",
        f"Give me a synonym of {word}.",
        f"Is there another word for {word}?",
    )
    answers: tuple[str, ...] = (
        f"Another word for {word} is {others[0]}.",
        f"You can also say {others[0]}.",
    )
    if len(others) > 1:
        answers = (f"Other words for {word} are {listing(others[:3])}.",)
    return random.choice(ways), random.choice(answers)


def opposite(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn | None:
    for mine, key, other in sense.opposites:
        if mine >= 0 and sense.words[mine].lower() == word.lower():
            found = net.senses[key].words[other]
            ways = (
                f"What is the opposite of {word}?",
                f"Name the opposite of {word}.",
                f"What is the antonym of {word}?",
            )
            return random.choice(ways), f"The opposite of {word} is {found}."
    return None


def kind_question(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn | None:
    above = net.ancestors(sense)
    if pos != "n" or len(above) < 3 or sense.instance:
        return None
    if random.random() < 0.5:
        known = [a.words[0] for a in above if a.words[0] in _GENERAL] or [above[0].words[0]]
        up = random.choice(known)
        answer = f"Yes, {noun_phrase(word)} is a kind of {up}."
    else:
        up = net.senses[random.choice(_general(net))].words[0]
        if any(up in s.words for s in above) or up in sense.words:
            return None
        answer = f"No, {noun_phrase(word)} is not {noun_phrase(up)}. It is a kind of {above[0].words[0]}."
    return f"Is {noun_phrase(word)} {noun_phrase(up)}?", answer


_GENERAL = ("animal", "plant", "person", "tool", "vehicle", "food", "color", "building", "bird",
            "fish", "tree", "flower", "disease", "number", "language", "instrument", "machine")  # fmt: skip


def _general(net: WordNet) -> list[tuple[str, str]]:
    return [net.index["n", word][0] for word in _GENERAL]


def kinds(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn | None:
    if pos != "n" or len(sense.kinds) < 3:
        return None
    names = random.sample([net.senses[k].words[0] for k in sense.kinds], 3)
    ways = (
        f"Name three kinds of {word}.",
        f"What kinds of {word} are there?",
        f"Give me examples of {noun_phrase(word)}.",
        f"Name some kinds of {word}.",
    )
    answers = (f"Some kinds of {word} are {listing(names)}.", f"For example {listing(names)}.")
    return random.choice(ways), random.choice(answers)


def reverse(net: WordNet, random: Random, pos: str, word: str, sense: Sense) -> Turn | None:
    if pos != "n" or len(sense.definition) > 90:
        return None
    what = sense.definition
    ways = (
        f"What do you call {what}?",
        f"Which word means: {what}?",
        f"What is the word for {what}?",
    )
    return random.choice(ways), random.choice(
        (f"That is {noun_phrase(word)}.", f"The word is {word}.")
    )


Maker = Callable[[WordNet, Random, str, str, Sense], Turn | None]
MAKERS: tuple[tuple[Maker, int], ...] = (
    (meaning, 12), (example, 3), (synonym, 2), (opposite, 2), (kind_question, 3), (kinds, 1), (reverse, 1),
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Words to ask about, with cumulative weights for `Random.choices`."""

    words: tuple[tuple[str, str], ...]
    cumulated: tuple[float, ...]

    @classmethod
    def of(cls, weights: dict[tuple[str, str], float]) -> "Vocabulary":
        return cls(tuple(weights), tuple(accumulate(weights.values())))

    def draw(self, random: Random) -> tuple[str, str]:
        return random.choices(self.words, cum_weights=self.cumulated)[0]

    def noun(self, random: Random) -> str:
        """Draws a lower-case noun of one word."""
        while True:
            pos, word = self.draw(random)
            if pos == "n" and word.isalpha():
                return word


def question(net: WordNet, random: Random, words: Vocabulary) -> Turn:
    """Returns a random question about one of `words` that can be answered."""
    makers, weights = zip(*MAKERS, strict=True)
    while True:
        pos, word = words.draw(random)
        if (maker := random.choices(makers, weights)[0]) is opposite:
            pos, word = random.choice(net.opposed)
        sense = net.first(pos, word)
        if sense is None or sense.coarse:
            continue
        spelled = next((w for w in sense.words if w.lower() == word.lower()), word)
        turn: Turn | None = maker(net, random, pos, spelled, sense)
        if turn and len(turn[1]) <= MAX_ANSWER and turn[1].isascii():
            return turn


def entry(net: WordNet, random: Random, sense: Sense) -> str:
    """Returns a dictionary entry in plain prose: definition, kind, examples."""
    word = sense.words[0]
    parts = [define(sense, word)]
    above = net.ancestors(sense)
    if sense.key[0] == "n" and len(above) > 1:
        parts.append(
            f"It is a kind of {above[0].words[0]}, which is a kind of {above[1].words[0]}."
        )
    if len(sense.words) > 1:
        parts.append(f"It is also called {listing(list(sense.words[1:4]))}.")
    parts += [sentence(e) for e in sense.examples[:3] if word[:4].lower() in e.lower()]
    return " ".join(parts)
