# ruff: noqa: E501 (sentences read best as they are)
"""Conversations made by rule: words, stories, small talk, facts, sums, quotations, tools.

`conversations(...)` is deterministic in its seed. A conversation is a list of messages in the
OpenAI form, plus the tools offered.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from training import facts
from training.calls import Message, tool_conversation
from training.lexicon import Turn, Vocabulary, question
from training.openended import open_question, vary
from training.readers import Document
from training.stories import story
from training.wordnet import WordNet, familiar


@dataclass(frozen=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[dict[str, object], ...] = ()


def small_talk(random: Random, entries: tuple[facts.Entry, ...] = facts.SMALL_TALK) -> Turn:
    asks, answers = random.choice(entries)
    return random.choice(asks), random.choice(answers)


def capital(random: Random) -> Turn:
    country, city = random.choice(tuple(facts.CAPITALS.items()))
    return random.choice(
        (
            (f"What is the capital of {country}?", f"The capital of {country} is {city}."),
            (f"Which city is the capital of {country}?", f"{city} is the capital of {country}."),
            (f"Where is {city}?", f"{city} is in {country}."),
            (f"In which country is {city}?", f"{city} is the capital of {country}."),
        )
    )


def arithmetic(random: Random) -> Turn:
    a, b = random.randrange(21), random.randrange(21)
    if random.random() < 0.3:
        a, b = random.randrange(100), random.randrange(100)
    if random.random() < 0.4:
        a, b = max(a, b), min(a, b)
        return random.choice(
            (
                (f"What is {a} minus {b}?", f"{a} minus {b} is {a - b}."),
                (f"{a} - {b} = ?", f"{a} - {b} = {a - b}"),
            )
        )
    if random.random() < 0.2:
        a, b = a % 11, b % 11
        return f"What is {a} times {b}?", f"{a} times {b} is {a * b}."
    return random.choice(
        (
            (f"What is {a} plus {b}?", f"{a} plus {b} is {a + b}."),
            (f"How much is {a} + {b}?", f"{a} + {b} = {a + b}"),
            (f"Add {a} and {b}.", f"{a} plus {b} is {a + b}."),
        )
    )


def calendar(random: Random) -> Turn:
    names, what = random.choice(((facts.DAYS, "day"), (facts.MONTHS, "month")))
    i = random.randrange(len(names))
    after, before = names[(i + 1) % len(names)], names[i - 1]
    return random.choice(
        (
            (f"Which {what} comes after {names[i]}?", f"{after} comes after {names[i]}."),
            (f"What {what} is before {names[i]}?", f"{before} comes before {names[i]}."),
            (
                f"Name the {what}s of the {'week' if what == 'day' else 'year'}.",
                f"The {what}s are {', '.join(names[:-1])} and {names[-1]}.",
            ),
        )
    )


def tell_story(random: Random) -> Turn:
    subject, text = story(random)
    return random.choice((
        f"Tell me a story about {subject}.", f"Tell me a story about {subject}.",
        f"Write a story about {subject}.", f"Write a short story about {subject}.",
        f"I would like to hear a story about {subject}.", f"Can you tell me a story about {subject}?",
        "Tell me a story.", "Tell me a story, please.", "Write a short story.",
    )), text  # fmt: skip


_QUOTES = {
    "r-cran-janeaustenr": ("Write something like Jane Austen.", "Read me something by Jane Austen.",
                           "Quote Jane Austen.", "Write in the style of an old novel."),
    "sword-text-web": ("Read me something from the Bible.", "Quote the Bible.",
                       "Tell me something from the Bible."),
    "dict-devil": ("Quote the Devil's Dictionary.", "Read me an entry of the Devil's Dictionary."),
    "golang-github-andybalholm-brotli-dev": ("Quote Isaac Newton.", "What did Newton write about light?"),
}  # fmt: skip


def quotation(random: Random, prose: dict[str, list[Document]]) -> Turn:
    source = random.choice(tuple(s for s in _QUOTES if s in prose))
    while True:
        text = random.choice(random.choice(prose[source]).paragraphs)
        if len(text) < 700:
            return random.choice(_QUOTES[source]), text


def about_page(random: Random, pages: list[Document]) -> Turn:
    page = random.choice(pages)
    text = " ".join(page.paragraphs[: random.choice((1, 1, 2))])
    title = page.title
    return random.choice((
        f"Tell me about {title}.", f"What do you know about {title}?", f"Explain {title}.",
        f"What does the manual say about {title}?",
    )), text  # fmt: skip


def usable_pages(prose: dict[str, list[Document]]) -> list[Document]:
    """Manual pages whose title reads as a subject and whose first paragraphs are short."""
    return [
        page
        for source, pages in prose.items()
        if source not in _QUOTES
        for page in pages
        if 2 <= len(page.title.split()) <= 5
        and page.title.replace(" ", "").replace("-", "").isalpha()
        and sum(map(len, page.paragraphs[:2])) < 800
    ]


def conversations(
    net: WordNet, prose: dict[str, list[Document]], *, count: int, seed: int
) -> Iterator[Conversation]:
    """`count` conversations of one to four exchanges. `prose` maps packages to documents."""
    random = Random(seed)
    pages = usable_pages(prose)
    words = Vocabulary.of(familiar(net))
    makers = (
        (lambda: question(net, random, words), 48),
        (lambda: tell_story(random), 14),
        (lambda: small_talk(random), 8),
        (lambda: small_talk(random, facts.FACTS), 5),
        (lambda: open_question(net, random, words), 8),
        (lambda: capital(random), 3),
        (lambda: arithmetic(random), 6),
        (lambda: calendar(random), 2),
        (lambda: quotation(random, prose), 3),
        (lambda: about_page(random, pages), 4),
    )
    kinds, weights = zip(*makers, strict=True)
    for _ in range(count):
        if random.random() < 0.06:
            messages, tools = tool_conversation(random)
            yield Conversation(tuple(messages), tuple(tools))
            continue
        messages = []
        if random.random() < 0.15:
            messages.append({"role": "system", "content": random.choice(facts.SYSTEM_PROMPTS)})
        for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
            ask, answer = random.choices(kinds, weights)[0]()
            messages.append({"role": "user", "content": vary(random, ask)})
            messages.append({"role": "assistant", "content": answer})
        yield Conversation(tuple(messages))
