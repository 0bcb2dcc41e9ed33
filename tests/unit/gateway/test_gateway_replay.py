"""Pure parts of a replay: what was sent, and what the client lacks of a repeated answer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from afd_gateway.journal import Journal, JournalSpace
from afd_gateway.replay import CHAT, TEXT, Continuation, Departed, Replay, Sent, replay_of
from afd_gateway.sse import DONE, failure_in

HEAD = {"id": "chatcmpl-1", "created": 5, "model": "m"}


def event(choice: dict[str, Any] | None = None, head: dict[str, Any] = HEAD, **more: Any) -> bytes:
    body = {**head, "choices": [] if choice is None else [{"index": 0, **choice}], **more}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def delta(tokens: list[int] | None, end: str | None = None, **said: Any) -> dict[str, Any]:
    return {"delta": said, "finish_reason": end, "token_ids": tokens}


def call(index: int, *, name: str | None = None, arguments: str | None = None) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    made: dict[str, Any] = {
        "index": index,
        "function": {key: value for key, value in function.items() if value is not None},
    }
    return made if name is None else {**made, "id": f"call-{random.random()}", "type": "function"}


def answer(head: dict[str, Any] = HEAD) -> list[bytes]:
    """Reasoning, text, and two tool calls, as vLLM's parsers stream them."""
    return [
        event({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, head),
        event(delta([1], reasoning="Let "), head),
        event(delta([2], reasoning="me"), head),
        event(delta([3]), head),  # the parser keeps it back
        event(delta([4], content="Sure"), head),
        event(delta([5], tool_calls=[call(0, name="get_weather")]), head),
        event(delta([6], tool_calls=[call(0, arguments='{"city":')]), head),
        event(delta([7], tool_calls=[call(0, arguments=' "Rome"}')]), head),
        event(delta([8], tool_calls=[call(1, name="get_time", arguments="{}")]), head),
        event(delta([9], end="tool_calls"), head),
        event(None, head, usage={"completion_tokens": 9}),
        DONE,
    ]


def said(events: Iterable[bytes]) -> dict[str, Any]:
    found: dict[str, Any] = {"tokens": [], "calls": {}, "ids": 0, "roles": 0, "heads": set()}
    for each in events:
        if each == DONE:
            found["done"] = found.get("done", 0) + 1
            continue
        body = json.loads(each.removeprefix(b"data: "))
        found["heads"].add((body["id"], body["created"]))
        if "usage" in body:
            found.setdefault("usage", []).append(body["usage"])
        for choice in body["choices"]:
            found["tokens"] += choice.get("token_ids") or []
            found["end"] = choice["finish_reason"] or found.get("end")
            said = choice["delta"]
            found["roles"] += "role" in said
            for key in ("content", "reasoning"):
                found[key] = found.get(key, "") + said.get(key, "")
            for made in said.get("tool_calls", ()):
                into = found["calls"].setdefault(made["index"], {})
                found["ids"] += "id" in made
                for key, text in made["function"].items():
                    into[key] = into.get(key, "") + text
    return found


def split(events: bytes) -> list[bytes]:
    return [part + b"\n\n" for part in events.split(b"\n\n") if part]


def continued(sent: list[bytes], repeated: list[bytes]) -> list[bytes]:
    rest = Continuation(Sent.of(part.rstrip() for part in sent))
    return [part for events in repeated for part in split(rest.feed(events))]


@pytest.mark.parametrize("at", range(13))
def test_an_answer_with_reasoning_and_tool_calls_goes_on_at_each_event(at: int) -> None:
    whole = answer()
    other = {**HEAD, "id": "chatcmpl-other", "created": 77}
    rest = continued(whole[:at], answer(other))
    assert said(whole[:at] + rest) == said(whole if at else answer(other))
    if at:  # events that nothing is cut from stay as they are; ids of calls are made anew
        assert len(rest) == len(whole[at:])


@pytest.mark.parametrize("seed", range(20))
def test_any_merging_of_tokens_gives_the_same_text(seed: int) -> None:
    """An answer from the start may come in other pieces."""
    draw = random.Random(seed)
    words = [(t, draw.choice(["a", "bc", "", "d e"])) for t in range(20)]

    def pieces() -> list[bytes]:
        made, left = [], list(words)
        while left:
            size = draw.randint(1, 4)
            part, left = left[:size], left[size:]
            text = "".join(text for _, text in part)
            end = None if left else "length"
            made.append(event(delta([t for t, _ in part], end=end, content=text)))
        return made

    one, other = pieces(), pieces()
    for at in range(1, len(one)):
        both = said(one[:at] + continued(one[:at], other))
        assert both == said(other)


def test_logprobs_are_cut_by_their_number() -> None:
    def made(tokens: list[int]) -> bytes:
        logprobs = {"tokens": [str(t) for t in tokens], "token_logprobs": [-0.5] * len(tokens)}
        choice = {"text": "".join(f"{t} " for t in tokens), "logprobs": logprobs}
        return event({**choice, "finish_reason": None, "token_ids": tokens})

    (rest,) = continued([made([1]), made([2])], [made([1, 2, 3, 4])])
    (choice,) = json.loads(rest.removeprefix(b"data: "))["choices"]
    assert choice["text"] == "3 4 " and choice["token_ids"] == [3, 4]
    assert choice["logprobs"] == {"tokens": ["3", "4"], "token_logprobs": [-0.5, -0.5]}


@pytest.mark.parametrize("known", [[], [1]])
def test_the_logprobs_of_a_token_without_text_reach_the_client(known: list[int]) -> None:
    """Such as of the first byte of a letter, alone or in one event with others."""

    def made(tokens: list[int], **text: str) -> bytes:
        logprobs = {"content": [{"token": str(t), "logprob": -float(t)} for t in tokens]}
        return event({**delta(tokens, **text), "logprobs": logprobs})

    request = {"stream": True, "logprobs": True, "messages": []}
    replay = replay_of("POST", CHAT, {}, json.dumps(request).encode())
    assert replay is not None
    repeated = made([1, 2], content="a") if known else made([2])
    (rest,) = continued([made([t], content="a") for t in known], [repeated])
    (choice,) = json.loads(replay.client_view(rest).removeprefix(b"data: "))["choices"]
    assert choice["delta"] == {} and choice["token_ids"] is None
    assert [entry["logprob"] for entry in choice["logprobs"]["content"]] == [-2.0]


def test_a_choice_that_has_ended_says_no_more() -> None:
    def made(index: int, tokens: list[int], end: str | None = None) -> bytes:
        text = {"index": index, "text": "x" * len(tokens), "token_ids": tokens}
        return event({**text, "finish_reason": end})

    sent = [made(0, [1, 2], "stop"), made(1, [3])]
    rest = continued(sent, [made(0, [1]), made(1, [3]), made(0, [9], "length"), made(1, [4]), DONE])
    assert rest == [made(1, [4]), DONE]


def test_a_different_text_or_token_departs() -> None:
    sent = [event(delta([1], content="abc"))]
    with pytest.raises(Departed, match="text"):
        continued(sent, [event(delta([1], content="abd"))])
    with pytest.raises(Departed, match="tokens"):
        continued(sent, [event(delta([2], content="abc"))])


def test_what_was_sent_after_the_usage_is_not_sent_again() -> None:
    whole = answer()
    assert continued(whole[:-1], answer()) == [DONE]
    assert continued(whole, answer()) == []


def test_the_body_goes_on_behind_what_was_sent() -> None:
    replay = Replay(CHAT, b'{"stream":true,"seed":1,"vllm_xargs":null}', ids_wanted=False)
    fields = json.loads(replay.next_body(Sent.of([e.rstrip() for e in answer()[:4]])) or b"")
    told = json.loads(fields["vllm_xargs"]["afd_resume"])
    assert told == {"stepwise": True, "choices": {"0": [[1, 2, 3], False]}}
    plain = [event(delta([1], content="a")).rstrip()]
    told = json.loads(
        json.loads(replay.next_body(Sent.of(plain)) or b"")["vllm_xargs"]["afd_resume"]
    )
    assert told == {"stepwise": False, "choices": {"0": [[1], False]}}
    # Without its tokens, an answer can only be made again.
    hidden = Sent.of([event(delta(None, content="a")).rstrip()])
    assert "vllm_xargs" in json.loads(replay.next_body(hidden) or b"")
    assert b"afd_resume" not in (replay.next_body(hidden) or b"")
    assert Replay(CHAT, b'{"stream":true}', ids_wanted=False).next_body(hidden) is None


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        (TEXT, b'{"stream": true}', False),
        (CHAT, b' {"stream": true, "return_token_ids": true}', True),
        (CHAT, b'{"stream": true, "return_token_ids": null}', False),
        (CHAT, b'{"stream": false}', None),
        (CHAT, b'{"stream": 1}', None),
        (CHAT, b'{"stream": true, "use_beam_search": true}', None),
        (CHAT, b'{"stream": true, "vllm_xargs": 3}', None),
        (CHAT, b'{"stream": true', None),
        (CHAT, b"[" * 100_000 + b'"stream"', None),
        ("/v1/responses", b'{"stream": true}', None),
    ],
)
def test_which_requests_can_be_replayed(path: str, body: bytes, wanted: bool | None) -> None:
    replay = replay_of("POST", path, {}, body)
    assert (None if replay is None else replay.ids_wanted) == wanted
    if replay is not None:
        assert json.loads(replay.first_body())["return_token_ids"] is True
    assert replay_of("POST", path, {"Content-Encoding": "gzip"}, body) is None
    assert replay_of("GET", path, {}, body) is None


def test_token_ids_are_not_asked_for_where_they_cost_the_echo() -> None:
    body = b'{"stream": true, "echo": true, "temperature": 0}'
    replay = replay_of("POST", TEXT, {}, body)
    assert replay is not None and replay.first_body() == body

    def made(text: str) -> bytes:
        return event({"text": text, "finish_reason": None, "token_ids": None})

    sent, whole = [made("prompt a")], [made("prompt a"), made("b"), DONE]
    again = replay.next_body(Sent.of(each.rstrip() for each in sent))
    assert again is not None and json.loads(again) == json.loads(body)
    assert continued(sent, whole) == whole[1:]
    told = replay_of("POST", TEXT, {}, b'{"stream": true, "echo": true, "return_token_ids": true}')
    assert told is not None and told.ids_wanted


def test_the_client_sees_no_token_ids_that_it_did_not_ask_for() -> None:
    choice = {"text": 'x "token_ids":[1] y', "finish_reason": None}
    asked = event({**choice, "prompt_token_ids": [1, 2], "token_ids": [3]})
    plain = event({**choice, "prompt_token_ids": None, "token_ids": None})
    replay = Replay(TEXT, b"{}", ids_wanted=False)
    assert replay.client_view(replay.kept_view(asked)) == plain
    kept_back = event(delta([1])) + event(delta([2], content="a"))
    shown = Replay(CHAT, b"{}", ids_wanted=False).client_view(kept_back)
    assert shown == event(delta(None, content="a"))
    assert Replay(CHAT, b"{}", ids_wanted=True).client_view(kept_back) == kept_back


def test_failures_are_found_among_events() -> None:
    good = event(delta([1], content='data: {"error": "finish_reason":"abort"'))
    assert failure_in(good) is None
    dead = b'data: {"error": {"message": "m", "code": 500}}\n\n'
    found = failure_in(good + dead + DONE)
    assert found is not None and (found.at, found.event) == (len(good), dead)
    assert failure_in(b'data: {"error": {"message": "m", "code": 400}}\n\n') is None
    assert failure_in(b'data: {"error": 3}\n\n') is None
    found = failure_in(good + event(delta([], end="abort")) + DONE)
    assert found is not None and found.at == len(good)


def test_a_journal_returns_its_events_and_keeps_to_its_space() -> None:
    space = JournalSpace(40_000)
    journal = Journal(space)
    events = [event(delta([i], content=f"word {i}")) for i in range(2000)]
    for each in events:
        journal.add(each)
    assert journal.complete and space.used < 30_000
    assert [e + b"\n\n" for e in journal.events()] == events
    second = Journal(space)
    second.add(b"x" * 50_000)
    assert not second.complete and list(second.events()) == []
    journal.close()
    second.close()
    assert space.used == 0
