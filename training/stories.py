# ruff: noqa: E501, SIM905 (long sentences and word lists)
"""Short stories from a small grammar, from which the model learns plain narrative English.

`story(random)` returns a subject ("a shy fox and a lost key") and the text. Plots are lists of
slots; each slot lists wordings of the same step. All texts were written for this project.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

NAMES = {
    "she": "Anna Mia Lily Rosa Emma Clara Nora Ivy Ada Tess Molly June Ruby Hanna Greta Zoe Maya".split(),
    "he": "Tom Ben Max Leo Sam Finn Otto Paul Jack Hugo Theo Oscar Will Karl Milo Adam Noah".split(),
}
ANIMALS = (
    "fox bear rabbit mouse owl hedgehog squirrel frog turtle duck wolf deer badger otter crow cat "
    "dog goat donkey lamb hen beaver mole sparrow snail goose pony kitten puppy lion elephant"
).split()
TRAITS = "shy brave kind clever lazy curious proud quiet cheerful careful stubborn gentle".split()
PLACES = (
    "in a small village by the sea", "at the edge of a great forest", "in a house on a hill",
    "near a slow green river", "in a busy town", "on a farm far from the city",
    "in a valley between two mountains", "beside a deep blue lake", "in an old mill",
    "in a garden full of flowers",
)  # fmt: skip
THINGS = (
    "key hat lantern bell kite book map spoon basket drum scarf boat whistle mirror button ring "
    "umbrella ball blanket clock flute shell coin letter painting"
).split()
FOODS = "bread soup cake apples berries honey cheese pancakes pie plums nuts carrots".split()
COLOURS = "red blue green yellow white black golden silver brown purple".split()
WEATHER = (
    ("sunny", "The sun was shining and the sky was blue."),
    ("rainy", "It was raining, and the road was full of puddles."),
    ("windy", "The wind was blowing through the trees."),
    ("snowy", "Snow had fallen in the night, and everything was white."),
    ("foggy", "A thick fog lay over the fields."),
    ("warm", "It was a warm and quiet day."),
)
MORALS = {
    "lost": ("look carefully before you give up", "a friend's eyes see what yours have missed"),
    "friend": ("a kind word is the beginning of a friendship", "it is never too late to say hello"),
    "fear": ("being brave means going on although you are afraid", "the dark is only the day with its eyes closed"),
    "share": ("what you share tastes twice as good", "giving makes two people happy"),
    "work": ("small steps every day reach the top of the hill", "patience does what hurry cannot"),
    "proud": ("it is wiser to listen than to boast", "the loudest voice is not always right"),
    "help": ("those who help others are never alone", "no one is too small to be of help"),
    "storm": ("a strong house is built before the storm", "together we are stronger than the wind"),
}  # fmt: skip


@dataclass(frozen=True)
class Cast:
    """Characters and things of a story. `he`, `him` and `his` refer to the hero."""

    hero: str  # "a shy fox named Tom" is written with the parts below
    name: str
    trait: str
    kind: str
    he: str
    him: str
    his: str
    friend: str
    friend_kind: str
    place: str
    thing: str
    colour: str
    food: str
    weather: str


def article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def cast(random: Random) -> Cast:
    """Draws characters and things. The friend has another name and kind than the hero."""
    he = random.choice(("she", "he"))
    name = random.choice(NAMES[he])
    friend = random.choice([n for names in NAMES.values() for n in names if n != name])
    human = {"she": "girl", "he": "boy"}[he]
    kind = random.choice([*ANIMALS, human, human, human, human])
    other = random.choice([a for a in ANIMALS if a != kind])
    trait = random.choice(TRAITS)
    return Cast(
        hero=f"{article(trait)} {trait} {kind}", name=name, trait=trait, kind=kind, he=he,
        him={"she": "her", "he": "him"}[he], his={"she": "her", "he": "his"}[he],
        friend=friend, friend_kind=other, place=random.choice(PLACES),
        thing=random.choice(THINGS), colour=random.choice(COLOURS), food=random.choice(FOODS),
        weather=random.choice(WEATHER)[1],
    )  # fmt: skip


Slot = tuple[str, ...]
OPENING: Slot = (
    "Once upon a time there was {hero} named {name}. {He} lived {place}.",
    "Once upon a time, {place}, there lived {hero} whose name was {name}.",
    "Long ago, {place}, there lived {hero}. {His} name was {name}.",
    "There once was {hero} called {name}, who lived {place}.",
    "{name} was {hero} who lived {place}.",
)
DAY: Slot = (
    "One morning {name} woke up early. {weather}",
    "One day {name} went out for a walk. {weather}",
    "{weather} {name} looked out of the window and smiled.",
    "One afternoon {name} had nothing to do. {weather}",
)
MEETS: Slot = (
    "On the way {he} met {friend}, {a_friend_kind}.",
    "Soon {he} met {a_friend_kind} named {friend}.",
    "By the path sat {a_friend_kind}. It was {friend}, an old friend.",
)
CLOSING: Slot = (
    "That evening {name} went home and slept well.",
    "From that day on, {name} and {friend} were the best of friends.",
    "When the stars came out, {name} was still smiling.",
    "And so the day ended, and {name} was happy.",
    "They sat together and ate {food} until the sun went down.",
)
PLOTS: dict[str, tuple[Slot, ...]] = {
    "lost": (
        ("{name} had {a_colour} {thing} that {he} loved very much.",
         "The thing {he} loved most was {a_colour} {thing}."),
        ("But the {thing} was gone. {name} looked under the bed and behind the door, but it was not there.",
         "Then {he} saw that the {thing} was missing. {He} looked everywhere, and could not find it.",
         "When {he} reached for the {thing}, it was not in its place. {name} felt very sad."),
        MEETS,
        ('"Why are you so sad?" asked {friend}. "I have lost my {thing}," said {name}.',
         '"What is the matter?" said {friend}. "My {thing} is gone," answered {name}, "and I do not know where to look."'),
        ('"Let us look for it together," said {friend}. They looked in the grass, under the stones and in the old tree.',
         '"Where did you see it last?" asked {friend}. {name} thought for a while. "Near the water," {he} said. So they went there together.'),
        ("At last they saw something {colour} between the leaves. It was the {thing}!",
         "And there, under a bush, lay the {colour} {thing}.",
         "{friend} saw it first. The {thing} was hanging on a branch, where the wind had carried it."),
        ('"Thank you," said {name}. "Without you I would never have found it."',
         "{name} was so glad that {he} danced all the way home."),
    ),
    "friend": (
        ("{name} had no one to play with, and often felt lonely.",
         "Every day {name} played alone, and wished for a friend."),
        ("One day {a_friend_kind} named {friend} came to live nearby.",
         "Then {a_friend_kind} named {friend} moved into the house next door."),
        ("{name} wanted to say hello, but did not know how to begin.",
         "At first {name} only watched from behind a tree."),
        ('Then {he} took some {food}, went over, and said, "Would you like some {food}?"',
         'At last {he} went up to {friend} and said, "Hello. My name is {name}. Do you want to play?"'),
        ('"Yes, please," said {friend}. "I was hoping that someone would ask."',
         '{friend} smiled. "I would like that very much," was the answer.'),
        ("They played with {a_colour} {thing} all afternoon, and laughed until they could not stand.",
         "Together they built a little house of sticks, and hung {a_colour} {thing} over its door."),
    ),
    "fear": (
        ("{name} was afraid of the dark.", "There was one thing {name} feared, and that was the night."),
        ("One night the lamp went out, and the whole house was black.",
         "One evening {he} stayed out too long, and it grew dark before {he} could get home."),
        ("{He} heard a strange noise. Knock, knock, it went. {name} did not dare to move.",
         "Something moved behind the trees. {name}'s heart beat fast."),
        ('"Who is there?" {he} asked in a small voice. "It is only me, {friend}," came the answer.',
         'Then {he} took a deep breath, and called out, "Who are you?" Out came {a_friend_kind}. It was {friend}.'),
        ('"I have brought {a_colour} {thing} for you," said {friend}. "Did I frighten you?" "A little," said {name}, and laughed.',
         '"I was afraid of you," said {name}. "And I was afraid of you," said {friend}, and both of them laughed.'),
        ("After that, {name} was not so afraid of the dark any more.",
         "They walked home side by side, and the night did not seem so dark."),
    ),
    "share": (
        ("{name} had a basket full of {food}, and wanted to eat it all alone.",
         "For {his} birthday {name} was given a great plate of {food}."),
        MEETS,
        ('"I have not eaten since yesterday," said {friend}. "May I have a little of your {food}?"',
         "{friend} looked at the {food} and said nothing, but looked very hungry."),
        ('{name} thought about it. "There is only enough for me," {he} said at first. But then {he} felt sorry.',
         "{name} held the {food} close. Then {he} saw how thin {friend} was, and was ashamed."),
        ('"Take half of it," said {name}, and they sat down in the grass and ate.',
         '"Come and sit with me," said {name}. "We will share it." And so they did.'),
        ('A week later {name} lost {his} way in the rain, and it was {friend} who came with {a_colour} {thing} and led {him} home.',
         "The next day {friend} came back and brought {name} a present. It was {a_colour} {thing}."),
    ),
    "work": (
        ("{name} wanted to make {a_colour} {thing}, the finest that anyone had ever seen.",
         "{name} had a dream. {He} wanted to build {a_colour} {thing} with {his} own hands."),
        ("On the first day {he} tried, and it broke. On the second day {he} tried again, and it broke again.",
         "It was harder than {he} had thought. Nothing would fit, and everything fell apart."),
        ('"Give it up," said the others. "You will never finish it."',
         'Everyone laughed. "It cannot be done," they said.'),
        ('But {friend} the {friend_kind} said, "Try once more, and go slowly."',
         'Only {friend}, an old {friend_kind}, did not laugh. "Do a little every day," was the advice.'),
        ("So {name} worked a little every morning, and did not hurry.",
         "{name} listened, and began again, one small piece at a time."),
        ("When winter came, the {thing} was finished, and it was beautiful.",
         "After many weeks it was done. Everyone came to see the {colour} {thing}, and no one laughed."),
    ),
    "proud": (
        ('"I am the fastest of all," {name} liked to say. "No one can beat me."',
         "{name} was sure that no one in the world was as clever as {he} was."),
        ('One day {friend} the {friend_kind} said, "Let us have a race to the old bridge."',
         'Then {friend}, {a_friend_kind}, said quietly, "Shall we see who is first at the old oak tree?"'),
        ("They began to run. {name} was soon far ahead, and could not see {friend} any more.",
         "{name} ran off at once, and {friend} came slowly behind."),
        ('"I have plenty of time," thought {name}, and sat down to eat some {food}. Soon {he} fell asleep.',
         "But {name} did not look where {he} was going, took the wrong path, and had to turn back."),
        ("When {name} arrived at last, {friend} was already there, waiting with a smile.",
         "When {he} came to the end, out of breath, {friend} was sitting there and looking at {a_colour} {thing}."),
        ('"You were right to keep going," said {name}. "Next time I will not boast."',
         '"I am sorry that I boasted," said {name}. "You won, and you won fairly."'),
    ),
    "help": (
        DAY,
        ('Suddenly {he} heard a cry. "Help! Help!" Someone had fallen into the water.',
         "Then {he} saw {a_friend_kind} who could not move. A heavy branch had fallen down."),
        ('It was {friend} the {friend_kind}. "Hold on," called {name}. "I am coming."',
         '"Do not worry," said {name}. "What is your name?" "I am {friend}," said the {friend_kind}.'),
        ("{name} looked around and saw a long rope. {He} pulled and pulled, until {friend} was free.",
         "{name} was not strong, but {he} was clever. With a long stick and a stone {he} lifted the weight."),
        ('"How can I thank you?" asked {friend}. "There is no need," said {name}.',
         '"You have saved my life," said {friend}. "Please take this {colour} {thing}."'),
    ),
    "storm": (
        ("One evening black clouds came over the hills. The wind grew stronger and stronger.",
         "In autumn a great storm came. The trees bent, and the rain beat on the roof."),
        ("{name} closed the windows and lit a candle.",
         "{name} sat by the fire with {a_colour} {thing} and listened to the wind."),
        ('Then there was a knock at the door. Outside stood {friend} the {friend_kind}, wet and cold. "The wind has taken my roof," said {friend}.',
         'Someone called from outside. It was {friend}, {a_friend_kind}, who had no place to go.'),
        ('"Come in and get warm," said {name}, and gave {friend} some {food}.',
         '"There is room enough for two," said {name}, and put another blanket by the fire.'),
        ("In the morning the storm was over, and the air was clear. Together they went to mend the roof.",
         "When the sun rose, they went out together and began to build a new house for {friend}."),
    ),
}  # fmt: skip


def story(random: Random) -> tuple[str, str]:
    """Returns (subject, text): a noun phrase, and four to nine short paragraphs."""
    c = cast(random)
    plot = random.choice(tuple(PLOTS))
    words = {
        **vars(c), "He": c.he.capitalize(), "His": c.his.capitalize(),
        "a_colour": f"{article(c.colour)} {c.colour}",
        "a_friend_kind": f"{article(c.friend_kind)} {c.friend_kind}",
    }  # fmt: skip
    slots = [OPENING, *PLOTS[plot]]
    if plot not in ("help", "storm", "friend") and random.random() < 0.5:
        slots.insert(1, DAY)
    slots.append(CLOSING)
    sentences = [random.choice(slot).format(**words) for slot in slots]
    if random.random() < 0.4:
        sentences.append(f"And {c.name} had learned that {random.choice(MORALS[plot])}.")
    breaks = random.choice((1, 2, 3))
    paragraphs = [" ".join(sentences[i : i + breaks]) for i in range(0, len(sentences), breaks)]
    subject: Callable[[], str] = random.choice((
        lambda: c.hero,
        lambda: f"{article(c.kind)} {c.kind}",
        lambda: f"{article(c.kind)} {c.kind} and {article(c.thing)} {c.thing}"
        if "{thing}" in str(PLOTS[plot]) else f"{article(c.kind)} {c.kind}",
        lambda: f"{article(c.kind)} {c.kind} named {c.name}",
        lambda: f"{article(c.kind)} {c.kind} and {article(c.friend_kind)} {c.friend_kind}",
    ))  # fmt: skip
    return subject(), "\n\n".join(paragraphs)
