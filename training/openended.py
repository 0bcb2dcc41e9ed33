# ruff: noqa: E501 (long sentences and word lists)
"""Open questions that a very small model cannot answer, with honest replies.

In the templates, `X` is a noun and `A X` the noun with its article. All texts were written for this
project.
"""

from collections.abc import Callable
from random import Random

from training.lexicon import Turn, Vocabulary, define, noun_phrase
from training.stories import ANIMALS, FOODS, PLACES, THINGS
from training.wordnet import WordNet

_UNKNOWN = (
    ("How does A X work?", "Explain how A X works.", "How do I make A X?", "How can I build A X?",
     "Why is A X important?", "Who invented the X?", "How old is the X?", "How much does A X cost?",
     "When was the first X made?", "Where can I buy A X?", "How do I repair A X?",
     "What is the best X?", "How many X are there?"),
    ("I do not know that. I am a very small model. But I can tell you what A X is.",
     "I am too small to know that. Ask me what A X is.",
     "That is too hard for me. I only know what the word X means.",
     "I am sorry, I do not know. I am only a tiny model."),
)  # fmt: skip
_OPINION = ("What do you think about X?", "What do you think of A X?", "Do you like A X?",
            "What is your opinion about X?", "How do you feel about X?")  # fmt: skip
_WHO = (
    ("Who is the king of X?", "Who is the president?", "Who won the game?", "What is the news today?",
     "What happened yesterday?", "What is the weather today?", "What time is it?", "What day is it today?",
     "How old are you?", "When were you born?", "What is my name?", "Where am I?", "Who am I?",
     "What is the meaning of life?", "Will it rain tomorrow?", "Who is the richest man in the world?",
     "Who is the queen of England?", "Who is the king of England?"),
    ("I do not know. I cannot look outside, I only know some words and stories.",
     "That I do not know. I am a small model and have no news.",
     "I am sorry, I do not know that.", "I wish I knew! I am only a small model."),
)  # fmt: skip
_HELP = (
    ("Can you help me with my homework?", "Can you help me with X?", "I need help.", "Please help me with A X.",
     "Can you write a program?", "Can you write some code?", "Can you translate this?", "Write an essay about X.",
     "Can you draw A X?", "Solve this equation.", "Can you sing?", "Can you speak French?"),
    ("I am too small for that, but I can explain a word or tell you a story.",
     "I am afraid I cannot do that. I can tell you what a word means.",
     "I would like to help, but I am a very small model. Ask me for a story, or about a word."),
)  # fmt: skip
_COOK = (
    ("What should I cook tonight?", "What should I eat?", "I am hungry.", "What is for dinner?",
     "Give me an idea for dinner.", "What shall we eat today?", "What do you like to eat?"),
    ("How about {food} and {other}?", "You could make {food}.", "Some {food} would be nice, and {other} after that."),
)  # fmt: skip
_PLACE = (
    ("Where should I go today?", "Where should I travel?", "Give me an idea for a trip.", "I want to go outside."),
    ("You could take a walk {place}.", "How about a day {place}?", "I would like to sit {place}."),
)  # fmt: skip
_CHEER = (
    ("I am sad today. Can you cheer me up?", "Cheer me up.", "I am tired.", "I am worried.", "I feel bad today.",
     "I lost my X.", "Nobody likes me.", "I am angry."),
    ("I am sorry to hear that. Take a deep breath, and have a cup of tea.",
     "I am sorry. Would you like to hear a story about {animal}?",
     "That is sad. Tomorrow will be a better day."),
)  # fmt: skip
_POEMS = (
    "The X is here, the X is there,\nthe X is almost everywhere.\nI looked for it by day and night,\nand found it in the morning light.",
    "O little X, so far away,\nI think of you both night and day.\nThe wind is cold, the road is long,\nand so I sing my little song.",
    "I saw A X beside the sea,\nI looked at it, it looked at me.\nThe waves were high, the sky was gray,\nand then the X had gone away.",
    "When evening comes and all is still,\nthe X is sleeping on the hill.\nThe stars are out, the moon is round,\nand no one makes a single sound.",
    "Who knows the X? I know it well.\nIt has a story it could tell\nof golden days and silver rain,\nof those who left and came again.",
)
_POEM_ASKS = ("Write a poem about X.", "Write a poem about the X.", "Write a short poem about A X.",
              "Tell me a poem about A X.", "Can you write a poem about the X?")  # fmt: skip


def fill(text: str, noun: str) -> str:
    """Returns the text with the noun in place of X and a capital first letter."""
    filled = text.replace("A X", noun_phrase(noun)).replace("X", noun)
    return filled[:1].upper() + filled[1:]


def _plain(random: Random, entry: tuple[tuple[str, ...], tuple[str, ...]], noun: str) -> Turn:
    asks, answers = entry
    food, other = random.sample(FOODS, 2)
    ask, answer = random.choice(asks), random.choice(answers)
    if "{" in answer:
        animal = noun_phrase(random.choice(ANIMALS))
        answer = answer.format(food=food, other=other, place=random.choice(PLACES), animal=animal)
    return fill(ask, noun), fill(answer, noun)


def opinion(net: WordNet, random: Random, noun: str) -> Turn:
    sense = net.first("n", noun)
    text = define(sense, noun) if sense else fill("A X is a word.", noun)
    return fill(random.choice(_OPINION), noun), random.choice((
        f"I have no opinion, but I can tell you what it is. {text}",
        f"I am only a program, and have no opinion. {text}",
    ))  # fmt: skip


def open_question(net: WordNet, random: Random, words: Vocabulary) -> Turn:
    """Returns an everyday question with an answer that a small model can honestly give."""
    noun = words.noun(random) if random.random() < 0.7 else random.choice((*ANIMALS, *THINGS))
    makers: tuple[tuple[Callable[[], Turn], int], ...] = (
        (lambda: _plain(random, _UNKNOWN, noun), 5),
        (lambda: opinion(net, random, noun), 3),
        (lambda: _plain(random, _WHO, noun), 3),
        (lambda: _plain(random, _HELP, noun), 2),
        (lambda: _plain(random, _COOK, noun), 2),
        (lambda: _plain(random, _PLACE, noun), 1),
        (lambda: _plain(random, _CHEER, noun), 2),
        (lambda: (fill(random.choice(_POEM_ASKS), noun), fill(random.choice(_POEMS), noun)), 3),
    )
    kinds, weights = zip(*makers, strict=True)
    turn: Turn = random.choices(kinds, weights)[0]()
    return turn


_BEFORE = ("Please tell me: ", "Hello! ", "Hi, ", "I have a question. ", "Okay. ", "Now, ", "And ")


def vary(random: Random, ask: str) -> str:
    """Returns a variant of the question: with a greeting or thanks, or without capitals and mark."""
    chance = random.random()
    if chance < 0.05:
        return random.choice(_BEFORE) + ask
    if chance < 0.12:
        return ask[:1].lower() + ask[1:].rstrip(".?!")
    if chance < 0.15:
        return ask + random.choice((" Please.", " Thank you!", " Thanks."))
    return ask
