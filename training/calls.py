# ruff: noqa: E501 (long sentences)
"""Conversations with tools: a request, a call in the format of vLLM's "hermes" parser, an answer.

Functions and phrases were written for this project. Arguments are copied from the request, so that
a small model can learn the format.
"""

import json
from dataclasses import dataclass
from random import Random

from training.facts import CAPITALS, DAYS
from training.stories import ANIMALS, FOODS, NAMES, THINGS

Message = dict[str, object]


@dataclass(frozen=True)
class Function:
    """A function offered as a tool. `{x}` in texts is replaced by argument x."""

    name: str
    description: str
    parameters: dict[str, str]  # name -> JSON type
    requests: tuple[str, ...]
    result: str
    answers: tuple[str, ...]


FUNCTIONS = (
    Function("get_weather", "Get the current weather of a city.", {"city": "string"},
             ("What is the weather in {city}?", "How is the weather in {city} today?", "Is it raining in {city}?",
              "What's the weather like in {city}?", "Weather in {city}, please."),
             '{{"temperature": {n}, "sky": "{sky}"}}',
             ("In {city} it is {sky} and {n} degrees.", "The weather in {city} is {sky}, at {n} degrees.")),
    Function("get_time", "Get the local time of a city.", {"city": "string"},
             ("What time is it in {city}?", "Tell me the time in {city}.", "How late is it in {city}?"),
             '{{"time": "{h}:{m}"}}', ("It is {h}:{m} in {city}.", "In {city} it is {h}:{m}.")),
    Function("add", "Add two numbers.", {"a": "integer", "b": "integer"},
             ("What is {a} plus {b}?", "Add {a} and {b}.", "Please add {a} to {b}."),
             '{{"sum": {sum}}}', ("The sum is {sum}.", "{a} plus {b} is {sum}.")),
    Function("send_message", "Send a message to a person.", {"to": "string", "text": "string"},
             ("Tell {to} that {text}.", "Send {to} a message: {text}.", "Write to {to} that {text}."),
             '{{"sent": true}}', ("I have sent your message to {to}.", "Done, {to} has your message.")),
    Function("set_alarm", "Set an alarm.", {"day": "string", "time": "string"},
             ("Wake me on {day} at {time}.", "Set an alarm for {day} at {time}.", "Please set an alarm on {day}, {time}."),
             '{{"ok": true}}', ("Your alarm is set for {day} at {time}.",)),
    Function("buy", "Put an item on the shopping list.", {"item": "string", "count": "integer"},
             ("Put {count} {item} on my list.", "Buy {count} {item}.", "I need {count} {item}."),
             '{{"items": {count}}}', ("{count} {item} are on your list.", "I have put {count} {item} on the list.")),
    Function("search", "Search the library for a subject.", {"query": "string"},
             ("Find a book about the {query}.", "Search for {query}.", "Look up {query}, please."),
             '{{"found": {n}}}', ("I found {n} books about {query}.", "There are {n} results for {query}.")),
    Function("play_music", "Play a piece of music.", {"title": "string"},
             ("Play {title}.", "Please play the song {title}.", "I want to hear {title}."),
             '{{"playing": true}}', ("Now playing {title}.",)),
)  # fmt: skip
TEXTS = (
    "I will be late", "dinner is ready", "the train is late", "I am at home", "we meet at noon",
    "the door is open", "I have found the key", "the cat is asleep", "it is snowing here",
)  # fmt: skip
SKIES = ("sunny", "cloudy", "rainy", "clear", "windy", "foggy")


def arguments(random: Random) -> dict[str, object]:
    """Returns values for every argument and result field of FUNCTIONS."""
    a, b = random.randrange(100), random.randrange(100)
    return {
        "city": random.choice(tuple(CAPITALS.values())), "a": a, "b": b, "sum": a + b,
        "to": random.choice(NAMES[random.choice(("she", "he"))]), "text": random.choice(TEXTS),
        "day": random.choice(DAYS), "time": f"{random.randrange(24)}:{random.choice(('00', '15', '30', '45'))}",
        "item": random.choice((*FOODS, "eggs", "pens", "lamps")), "count": random.randrange(1, 20),
        "query": random.choice((*ANIMALS, *THINGS)), "n": random.randrange(1, 35),
        "title": f"{random.choice(('The', 'A'))} {random.choice(ANIMALS).title()} and the {random.choice(THINGS).title()}",
        "sky": random.choice(SKIES), "h": random.randrange(24), "m": f"{random.randrange(60):02d}",
    }  # fmt: skip


def schema(function: Function) -> dict[str, object]:
    properties = {name: {"type": kind} for name, kind in function.parameters.items()}
    return {
        "type": "function",
        "function": {
            "name": function.name,
            "description": function.description,
            "parameters": {
                "type": "object", "properties": properties, "required": list(function.parameters),
            },
        },
    }  # fmt: skip


def tool_conversation(random: Random) -> tuple[list[Message], list[dict[str, object]]]:
    """Returns (messages, tools), with one to three tools offered and one called."""
    offered = random.sample(FUNCTIONS, random.choice((1, 1, 2, 3)))
    function = random.choice(offered)
    values = arguments(random)
    chosen = {name: values[name] for name in function.parameters}
    messages: list[Message] = [
        {"role": "user", "content": random.choice(function.requests).format(**values)},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"function": {"name": function.name, "arguments": json.dumps(chosen)}},
            ],
        },
        {"role": "tool", "content": function.result.format(**values)},
        {"role": "assistant", "content": random.choice(function.answers).format(**values)},
    ]
    return messages, [schema(f) for f in offered]
