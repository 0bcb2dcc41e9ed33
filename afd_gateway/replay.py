"""Goes on with a streamed answer whose attention instance died. Pure.

vLLM is asked to name the token ids of what it answers. If the instance dies, the request is sent
again together with the tokens so far. An attention instance takes them as generated
(attention_worker/vllm_hooks/resume.py) and repeats their events. :class:`Continuation` removes what
the client has already, checks that it is the same, and keeps the ids of the first answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from afd_gateway.sse import DONE

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESUME = "afd_resume"
"""Key in ``vllm_xargs``. Also in attention_worker/vllm_hooks/resume.py."""
MAX_BODY_BYTES = 8 * 2**20
"""Larger bodies are not parsed, because the other requests would wait."""
MAX_EVENT_BYTES = 32 * 2**20
"""The first event names the tokens of the prompt."""

_PROMPT_IDS = re.compile(rb'"prompt_token_ids":\[[0-9,]*\]')
_TOKEN_IDS = re.compile(rb'"token_ids":\[[0-9,]*\]')
_TEXTS = ("content", "reasoning", "reasoning_content", "refusal")
_Json = dict[str, Any]


class Departed(Exception):
    """The repeated answer is not the one that the client has the beginning of."""


@dataclass(frozen=True)
class Replay:
    """A request whose streamed answer can go on elsewhere.

    body: as the client sent it. ids_wanted: the client asked for token ids itself. echoes: the
    answer begins with the prompt. vLLM leaves its text out where token ids are asked for
    (vllm/entrypoints/openai/completion/serving.py), so the gateway does not ask.
    """

    path: str
    body: bytes
    ids_wanted: bool
    echoes: bool = False

    def first_body(self) -> bytes:
        """Returns the body that asks for token ids too."""
        if self.ids_wanted or self.echoes:
            return self.body
        # Inserted, not written anew. A later null or false of the client would win.
        if b'"return_token_ids"' not in self.body:
            at = self.body.index(b"{") + 1
            return self.body[:at] + b'"return_token_ids":true,' + self.body[at:]
        return _dump({**json.loads(self.body), "return_token_ids": True})

    def next_body(self, sent: Sent) -> bytes | None:
        """Returns the body that goes on behind ``sent``; None: it cannot."""
        fields = json.loads(self.body)
        if not sent.choices:  # not even a role was sent
            return self.first_body()
        if not self.echoes:
            fields["return_token_ids"] = True
        if not all(choice.exact for choice in sent.choices.values()):
            return _dump(fields) if is_deterministic(fields) else None
        stepwise = self.path == CHAT and (bool(fields.get("tools")) or sent.parsed)
        given = {
            str(index): [choice.tokens, choice.finished] for index, choice in sent.choices.items()
        }
        told = json.dumps({"stepwise": stepwise, "choices": given}, separators=(",", ":"))
        fields["vllm_xargs"] = {**(fields.get("vllm_xargs") or {}), RESUME: told}
        return _dump(fields)

    def client_view(self, events: bytes) -> bytes:
        """Returns complete events without what only the gateway asked for."""
        if self.ids_wanted:
            return events
        events = _TOKEN_IDS.sub(b'"token_ids":null', events)
        # Without token ids, vLLM sends no event for a token without text, unless it has a
        # log-probability (vllm/entrypoints/openai/chat_completion/serving.py).
        if self.path == CHAT and b'"delta":{}' in events:
            kept = [e for e in _split(events) if not _is_empty(e)]
            events = b"".join(event + b"\n\n" for event in kept)
        return events

    def kept_view(self, events: bytes) -> bytes:
        """Returns complete events as the journal keeps them: without the tokens of the prompt."""
        if not self.ids_wanted and b'"prompt_token_ids":[' in events:
            return _PROMPT_IDS.sub(b'"prompt_token_ids":null', events)
        return events


def replay_of(method: str, path: str, headers: Mapping[str, str], body: bytes) -> Replay | None:
    """Returns how to go on with the answer to a request; None: it is not a stream of tokens."""
    if method != "POST" or path not in (CHAT, TEXT) or "Content-Encoding" in headers:
        return None
    if b'"stream"' not in body or len(body) > MAX_BODY_BYTES:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("stream") is not True:
        return None
    if fields.get("use_beam_search") or not isinstance(fields.get("vllm_xargs", {}), dict | None):
        return None
    echoes = path == TEXT and bool(fields.get("echo"))
    return Replay(path, body, fields.get("return_token_ids") is True, echoes)


def is_deterministic(fields: Mapping[str, Any]) -> bool:
    """Whether the request gives the same answer again."""
    return fields.get("temperature") == 0 or fields.get("seed") is not None


@dataclass
class ChoiceSent:
    """What was sent of one choice. texts: channel -> text. exact: every token is known."""

    tokens: list[int] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    logprobs: int = 0
    finished: bool = False
    exact: bool = True


@dataclass
class Sent:
    """What was sent of a streamed answer.

    parsed: a parser has split the text. usage: the event with the usage was sent.
    """

    choices: dict[int, ChoiceSent] = field(default_factory=dict)
    head: tuple[bytes, bytes] | None = None
    parsed: bool = False
    usage: bool = False
    done: bool = False

    @classmethod
    def of(cls, events: Iterable[bytes]) -> Sent:
        """Reads the events of a journal."""
        sent = cls()
        for event in events:
            sent._add(event)
        return sent

    def _add(self, event: bytes) -> None:
        if event == DONE.rstrip():
            self.done = True
            return
        body = _load(event)
        if body is None:
            return
        self.head = self.head or _head(body)
        self.usage |= not body.get("choices") and "usage" in body
        for choice in body.get("choices", ()):
            known = self.choices.setdefault(choice["index"], ChoiceSent())
            tokens = choice.get("token_ids")
            texts = [(name, holder[key]) for name, holder, key in _channels(choice)]
            known.tokens += tokens or ()
            known.logprobs += _count_logprobs(choice)
            for name, text in texts:
                known.texts[name] = known.texts.get(name, "") + text
            if tokens is None and any(text for _, text in texts):
                known.exact = False
            known.finished |= choice.get("finish_reason") is not None
            self.parsed |= any(name not in ("text", "content") for name, _ in texts) or (
                choice.get("delta") == {} and not known.finished
            )


class Continuation:
    """Turns the events of a repeated answer into those that the client lacks."""

    def __init__(self, sent: Sent) -> None:
        self._sent = sent
        self._left = {
            index: ChoiceSent(list(c.tokens), dict(c.texts), c.logprobs, c.finished, c.exact)
            for index, c in sent.choices.items()
        }
        self._renamed: tuple[tuple[bytes, bytes], ...] | None = None
        self.caught_up = not self._left

    def feed(self, events: bytes) -> bytes:
        """Returns what to forward of complete events. Raises Departed."""
        if self._renamed is None:
            self._renamed = self._renames(events)
        for new, old in self._renamed:
            events = events.replace(new, old)
        if self.caught_up and not (self._sent.usage or self._sent.done or self._finished()):
            return events
        return b"".join(self._rest(event) for event in _split(events))

    def _finished(self) -> bool:
        return any(choice.finished for choice in self._left.values())

    def _renames(self, events: bytes) -> tuple[tuple[bytes, bytes], ...]:
        body = next(filter(None, map(_load, _split(events))), None)
        if body is None or self._sent.head is None:
            return ()
        return tuple(zip(_head(body), self._sent.head, strict=True))

    def _rest(self, event: bytes) -> bytes:
        if event == DONE.rstrip():
            return b"" if self._sent.done else DONE
        body = _load(event)
        if body is None:
            return event + b"\n\n"
        if not body.get("choices"):
            return b"" if self._sent.usage and "usage" in body else event + b"\n\n"
        changed, kept = False, []
        for choice in body["choices"]:
            left = self._left.get(choice["index"])
            if left is None:
                kept.append(choice)
            elif left.finished:
                changed = True
            else:
                cut = _cut(choice, left)
                changed |= cut
                if not cut or _says_something(choice):
                    kept.append(choice)
        self.caught_up = all(
            choice.finished or not (choice.tokens or any(choice.texts.values()))
            for choice in self._left.values()
        )
        if not changed:
            return event + b"\n\n"
        return b"data: " + _dump({**body, "choices": kept}) + b"\n\n" if kept else b""


def _cut(choice: _Json, left: ChoiceSent) -> bool:
    """Removes from ``choice`` what ``left`` still holds, and from both. Returns whether it did."""
    cut = False
    tokens = choice.get("token_ids") or []
    if known := left.tokens[: len(tokens)]:
        if tokens[: len(known)] != known:
            raise Departed("the tokens differ")
        choice["token_ids"] = tokens[len(known) :]
        del left.tokens[: len(known)]
        cut = True
    for name, holder, key in list(_channels(choice)):
        text, before = holder[key], left.texts.get(name, "")
        common = min(len(text), len(before))
        if text[:common] != before[:common]:
            raise Departed("the text differs")
        if common:
            holder[key] = text[common:]
            left.texts[name] = before[common:]
            cut = True
            if key == "name" and not holder[key]:
                del holder[key]
    if entries := min(left.logprobs, _count_logprobs(choice)):
        left.logprobs -= entries
        _drop_logprobs(choice, entries)
        cut = True
    delta = choice.get("delta")
    if delta is not None:
        if delta.pop("role", None) is not None:  # the first event of a choice
            cut = True
        if cut and "tool_calls" in delta:
            _drop_sent_calls(delta)
        if cut:
            for key in _TEXTS:
                if delta.get(key) == "":
                    del delta[key]
    return cut


def _drop_sent_calls(delta: _Json) -> None:
    calls = []
    for call in delta["tool_calls"]:
        function = call.get("function") or {}
        if "name" not in function:  # sent before, with its id
            call = {key: value for key, value in call.items() if key not in ("id", "type")}
        if function.get("name") or function.get("arguments"):
            calls.append(call)
    delta.pop("tool_calls")
    if calls:
        delta["tool_calls"] = calls


def _says_something(choice: _Json) -> bool:
    return bool(
        choice.get("finish_reason")
        or choice.get("token_ids")
        or _count_logprobs(choice)
        or any(holder[key] for _, holder, key in _channels(choice))
    )


def _channels(choice: _Json) -> Iterator[tuple[str, _Json, str]]:
    """Yields the texts of a choice: (name of the channel, object that holds the text, its key)."""
    if isinstance(choice.get("text"), str):
        yield "text", choice, "text"
    delta = choice.get("delta") or {}
    for key in _TEXTS:
        if isinstance(delta.get(key), str):
            yield key, delta, key
    for call in delta.get("tool_calls") or ():
        function = call.get("function") or {}
        for key in ("name", "arguments"):
            if isinstance(function.get(key), str):
                yield f"tool {call['index']} {key}", function, key


def _count_logprobs(choice: _Json) -> int:
    logprobs = choice.get("logprobs") or {}
    return len(logprobs.get("tokens") or logprobs.get("content") or ())


def _drop_logprobs(choice: _Json, count: int) -> None:
    choice["logprobs"] = {
        key: value[count:] if isinstance(value, list) else value
        for key, value in choice["logprobs"].items()
    }


def _head(body: _Json) -> tuple[bytes, bytes]:
    """Returns what names the answer in every event, as its bytes."""
    return b'"id":' + _dump(body.get("id")), b'"created":' + _dump(body.get("created"))


def _is_empty(event: bytes) -> bool:
    return (
        b'"delta":{}' in event and b'"finish_reason":null' in event and b'"logprobs":{' not in event
    )


def _split(events: bytes) -> list[bytes]:
    return [event for event in events.split(b"\n\n") if event]


def _load(event: bytes) -> _Json | None:
    try:
        body = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return None
    return body if isinstance(body, dict) and "error" not in body else None


def _dump(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
