"""Requests of many kinds, and their answers in a form that can be compared."""

import asyncio
import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from helpers import tokens_of

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": _SCHEMA}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "w", "schema": _SCHEMA, "strict": True}}


@dataclass(frozen=True)
class Kind:
    """A kind of request. exact: its answer is the same each time, also beside other requests."""

    name: str
    fields: Mapping[str, Any]
    exact: bool = True

    @property
    def path(self) -> str:
        return CHAT if "messages" in self.fields else TEXT

    def body(self, number: int, *, stream: bool, length: int) -> dict[str, Any]:
        """Returns the body of request ``number``, which determines its prompt."""
        fields = copy.deepcopy(dict(self.fields))
        if "messages" in fields:
            fields["messages"] = [{"role": "user", "content": f"Say hello to number {number}."}]
        elif isinstance(fields["prompt"], int):
            ids = [list(tokens_of(f"{self.name}{number}.{i}", 5 + 3 * (number % 9) + i))
                   for i in range(fields["prompt"])]  # fmt: skip
            fields["prompt"] = ids if len(ids) > 1 else ids[0]
        fields.setdefault("max_tokens", length)
        if stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": "model", **fields}


_GREEDY = {"temperature": 0, "ignore_eos": True}
_ONE_LIKELY = {"temperature": 1.0, "top_k": 1, "ignore_eos": True}  # greedy, which allows no n


def kinds(terse: Mapping[str, float]) -> tuple[Kind, ...]:
    """terse: a logit_bias that keeps grammars from blanks."""
    talk: dict[str, Any] = {"messages": [], "temperature": 0}
    return (
        Kind("greedy", {"prompt": 1, **_GREEDY}),
        Kind("logprobs", {"prompt": 1, **_GREEDY, "logprobs": 2}),
        Kind("two", {"prompt": 1, **_ONE_LIKELY, "n": 2}),
        Kind("prompts", {"prompt": 3, **_GREEDY}),
        Kind("echo", {"prompt": 1, **_GREEDY, "echo": True, "logprobs": 1}),
        Kind("stop", {"prompt": 1, **_GREEDY, "stop": ["e", "ing "]}),
        Kind("penalties", {"prompt": 1, **_GREEDY, "presence_penalty": 1.5,
                           "frequency_penalty": 0.5, "repetition_penalty": 1.2}),
        Kind("limits", {"prompt": 1, "temperature": 0, "min_tokens": 30, "bad_words": ["a b"]}),
        Kind("regex", {"prompt": 1, "temperature": 0,
                       "structured_outputs": {"regex": "[a-f]{20,40}-[0-9]{30}"}}),
        Kind("chat", {**talk, "ignore_eos": True}),
        Kind("chat logprobs", {**talk, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}),
        Kind("chat two", {"messages": [], **_ONE_LIKELY, "n": 2}),
        Kind("schema", {**talk, "response_format": _FORMAT, "logit_bias": terse,
                        "max_tokens": 120}),
        Kind("tools", {**talk, "tools": [_TOOL], "tool_choice": "required", "logit_bias": terse,
                       "max_tokens": 150}),
        Kind("auto tools", {**talk, "tools": [_TOOL], "tool_choice": "auto"}),
        # CPUs keep a seed only if every request of the step has one (vLLM's sampler).
        Kind("seed", {"prompt": 1, "temperature": 1.0, "top_p": 0.9, "seed": 5, "n": 2,
                      "ignore_eos": True}, exact=False),
        Kind("random", {"prompt": 1, "temperature": 1.0, "ignore_eos": True}, exact=False),
        Kind("random schema", {"messages": [], "temperature": 1.0, "response_format": _FORMAT,
                               "logit_bias": terse, "max_tokens": 120}, exact=False),
    )  # fmt: skip


@dataclass
class Reply:
    """An answer, whole or put together from a stream.

    choices: index -> (texts by name, token ids, log-probabilities, finish reason). ids: of the
    answer; more than one means that a stream changed it. error: in words.
    """

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    ids: set[str] = field(default_factory=set)
    error: str = ""
    events: int = 0

    def says(self) -> dict[str, Any]:
        """Returns all but log-probabilities and token ids, for comparisons."""
        return {
            "usage": self.usage,
            **{
                index: {k: v for k, v in choice.items() if k not in ("logprobs", "tokens")}
                for index, choice in self.choices.items()
            },
        }

    def add(self, body: Mapping[str, Any]) -> None:
        self.events += 1
        if "error" in body:
            self.error = json.dumps(body["error"])
            return
        self.ids.add(f"{body['id']} {body['created']}")
        if body.get("usage"):
            assert self.usage is None, "the usage came twice"
            usage = body["usage"]
            self.usage = {k: usage[k] for k in ("prompt_tokens", "completion_tokens")}
        for choice in body["choices"]:
            known = self.choices.setdefault(choice["index"], {"logprobs": [], "tokens": []})
            assert not (known.get("finish") and choice.get("finish_reason")), "a choice ended twice"
            known["finish"] = choice.get("finish_reason") or known.get("finish")
            known["stop"] = choice.get("stop_reason") or known.get("stop")
            known["tokens"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            known["logprobs"] += logprobs.get("token_logprobs") or [
                entry["logprob"] for entry in logprobs.get("content") or ()
            ]
            said = choice.get("delta") or choice.get("message") or choice
            for name in ("text", "content", "reasoning"):
                if isinstance(said.get(name), str):
                    known[name] = known.get(name, "") + said[name]
            for place, call in enumerate(said.get("tool_calls") or ()):
                at = call.get("index", place)
                known[f"ids {at}"] = known.get(f"ids {at}", 0) + bool(call.get("id"))
                for name in ("name", "arguments"):
                    key = f"{name} {at}"
                    known[key] = known.get(key, "") + (call["function"].get(name) or "")
            for key in known:
                # vLLM's hermes parser ends a call that is cut before its arguments with "{}" if the
                # name came with the last tokens, else with nothing.
                if key.startswith("arguments") and known["finish"] == "length":
                    known[key] = "" if known[key] == "{}" else known[key]


async def ask(session: aiohttp.ClientSession, url: str, path: str, body: object) -> Reply:
    """Sends one request and reads the answer. Errors are in the reply."""
    reply = Reply()
    try:
        async with session.post(url + path, json=body) as answer:
            data = await answer.read()
        if answer.status != 200:
            reply.error = f"{answer.status} {data.decode(errors='replace')}"
        elif answer.content_type == "application/json":
            reply.add(json.loads(data))
        else:
            events = data.decode().split("\n\n")
            if events[-2:] != ["data: [DONE]", ""]:
                reply.error = f"the stream ends with {events[-2:]}"
            for event in events[:-2]:
                reply.add(json.loads(event.removeprefix("data: ")))
    except (aiohttp.ClientError, OSError) as error:
        reply.error = repr(error)
    return reply


def ask_all(url: str, requests: Sequence[tuple[str, object]]) -> list[Reply]:
    """Sends requests (path, body) at the same time."""

    async def work() -> list[Reply]:
        timeout = aiohttp.ClientTimeout(total=240)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            return await asyncio.gather(*(ask(session, url, path, b) for path, b in requests))

    return asyncio.run(work())


def mixed(kinds: Sequence[Kind], count: int, length: int) -> list[tuple[Kind, dict[str, Any]]]:
    """Returns ``count`` requests of all kinds in turn; two of three are streamed."""
    chosen = [(kinds[i % len(kinds)], i) for i in range(count)]
    return [(kind, kind.body(i, stream=i % 3 > 0, length=length)) for kind, i in chosen]


def ask_mixed(url: str, requests: Sequence[tuple[Kind, dict[str, Any]]]) -> list[Reply]:
    """Sends requests of :func:`mixed` at the same time."""
    return ask_all(url, [(kind.path, body) for kind, body in requests])


def problems(kind: Kind, wanted: Reply, found: Reply) -> list[str]:
    """Says how an answer differs from the undisturbed one; [] if it does not."""
    if found.error:
        return [f"{kind.name}: {found.error}"]
    if len(found.ids) != 1:
        return [f"{kind.name}: the answer changed its id: {found.ids}"]
    if not kind.exact:
        if "schema" in kind.name:
            fields = json.loads(found.choices[0]["content"])
            return [] if set(fields) == {"city", "days"} else [f"{kind.name}: {fields}"]
        same = found.usage == wanted.usage and len(found.choices) == len(wanted.choices)
        return [] if same else [f"{kind.name}: usage {found.usage} instead of {wanted.usage}"]
    wrong = []
    if found.says() != wanted.says():
        wrong.append(f"{kind.name}: {found.says()} instead of {wanted.says()}")
    for index, choice in wanted.choices.items():
        logprobs = found.choices.get(index, {}).get("logprobs", [])
        if [x is None for x in logprobs] != [x is None for x in choice["logprobs"]] or [
            x for x in logprobs if x is not None
        ] != pytest.approx([x for x in choice["logprobs"] if x is not None], abs=1e-4):
            wrong.append(f"{kind.name}: logprobs {logprobs} instead of {choice['logprobs']}")
    return wrong
