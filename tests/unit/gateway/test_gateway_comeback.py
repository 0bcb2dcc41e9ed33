"""A client that comes back with the same request id gets the rest of its answer."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from gateway_fakes import QUICK, Rig, rig, run
from token_fakes import TokenInstance, events_of

from afd_gateway.api_keys import add_api_key
from afd_gateway.comeback import Wish, numbered, rest_of, wish_of
from afd_gateway.errors import GatewayError
from afd_gateway.kept_answers import SLOT, Answers, Head, Keeper, make_answers
from afd_gateway.replay import CHAT, TEXT
from afd_gateway.settings import GatewaySettings
from afd_gateway.sse import DONE

ASK = {"prompt": "x", "stream": True, "max_tokens": 9}
NAMED = {"X-Request-Id": "r-1"}
COUNTED = {**NAMED, "Last-Event-ID": "0"}


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = make_answers(2, 8 * SLOT)  # four slots for each process
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def keeps() -> Iterator[GatewaySettings]:
    descriptor = make_answers(1)
    yield replace(QUICK, answers=descriptor)
    os.close(descriptor)


def used(gw: Rig) -> int:
    answers = gw.server.gateway.answers
    assert answers is not None
    return answers.used


async def begin(gw: Rig, events: int, headers: dict[str, str], fields: dict = ASK) -> bytes:
    """Reads some events of an answer and breaks the connection."""
    path = CHAT if "messages" in fields else TEXT
    answer = await gw.client.post(gw.url + path, json=fields, headers=headers)
    assert answer.status == 200 and answer.headers["X-Request-Id"] == headers["X-Request-Id"]
    read = b""
    while read.count(b"\n\n") < events:
        read += await answer.content.readany()
    await asyncio.sleep(0.1)  # the instance fails
    answer.close()
    return read


async def ask(
    gw: Rig, headers: dict[str, str], fields: dict = ASK, status: int = 200
) -> tuple[bytes, aiohttp.ClientResponse]:
    path = CHAT if "messages" in fields else TEXT
    async with gw.client.post(gw.url + path, json=fields, headers=headers) as answer:
        assert answer.status == status
        return await answer.read(), answer


def whole(fields: dict = ASK) -> list[str]:
    made = TokenInstance()
    return [made._text_of(position * 7) for position in range(fields["max_tokens"])]


def texts(answer: bytes) -> list[str]:
    return [c["text"] for body in events_of(answer) for c in body["choices"]]


def split_ids(answer: bytes) -> tuple[list[int], bytes]:
    """Returns the numbers of the events, and the events without them."""
    numbers, plain = [], b""
    for event in answer.split(b"\n\n")[:-1]:
        line, _, rest = event.partition(b"\n")
        numbers.append(int(line.removeprefix(b"id: ")))
        plain += rest + b"\n\n"
    return numbers, plain


def test_a_broken_connection_gets_its_stream_again_and_the_rest_of_it(
    keeps: GatewaySettings,
) -> None:
    async def work() -> None:
        instance = TokenInstance(die_after=4, how="hang")
        async with rig(instance, settings=keeps) as gw:
            await begin(gw, 4, NAMED)
            instance.die_after = 10**9
            again, answer = await ask(gw, NAMED)
            assert texts(again) == whole()
            assert answer.headers["x-afd-instance"] == "attention-0"
            assert len({body["id"] for body in events_of(again)}) == 1
            told = json.loads(instance.requests[1]["vllm_xargs"]["afd_resume"])
            assert len(told["choices"]["0"][0]) == 4  # it went on, and was not begun anew
            assert (await ask(gw, NAMED))[0] == again  # it has ended, and is kept
            assert len(instance.requests) == 2

    run(work())


@pytest.mark.parametrize("had", [1, 3, 4])
def test_a_client_that_counts_events_gets_each_once(keeps: GatewaySettings, had: int) -> None:
    async def work() -> None:
        instance = TokenInstance(die_after=4, how="hang")
        async with rig(instance, settings=keeps) as gw:
            await begin(gw, 4, COUNTED)
            instance.die_after = 10**9
            rest, _ = await ask(gw, {**NAMED, "Last-Event-ID": str(had)})
            numbers, plain = split_ids(rest)
            assert numbers == list(range(had + 1, 11))  # 9 tokens and the last event
            assert texts(plain) == whole()[had:]
            last, _ = await ask(gw, {**NAMED, "Last-Event-ID": "9"})
            assert last == b"id: 10\n" + DONE
            error, _ = await ask(gw, {**NAMED, "Last-Event-ID": "11"}, status=410)
            assert b"event 11 of this answer is not kept" in error

    run(work())


def test_a_chat_whose_empty_events_are_left_out_is_counted_as_the_client_saw_it(
    keeps: GatewaySettings,
) -> None:
    talk = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 6}

    async def work() -> None:
        instance = TokenInstance(die_after=3, how="hang")
        async with rig(instance, settings=keeps) as gw:
            first = await begin(gw, 4, COUNTED, talk)
            instance.die_after = 10**9
            rest, _ = await ask(gw, {**NAMED, "Last-Event-ID": "4"}, talk)
            numbers, plain = split_ids(first + rest)
            assert numbers == list(range(1, 9))
            said = [c["delta"]["content"] for b in events_of(plain) for c in b["choices"]]
            assert said == ["", *whole({"max_tokens": 6})]

    run(work())


def test_only_the_same_request_of_the_same_key_gets_the_answer(
    keeps: GatewaySettings, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    alice, bob = (
        {**NAMED, "Authorization": f"Bearer {add_api_key(keys, name)}"} for name in ("alice", "bob")
    )
    settings = replace(keeps, api_keys=keys)

    async def work() -> None:
        instance = TokenInstance()
        async with rig(instance, settings=settings) as gw:
            first, _ = await ask(gw, alice)
            assert (await ask(gw, alice))[0] == first and len(instance.requests) == 1
            for headers, fields in (
                (bob, ASK),
                ({**alice, "X-Request-Id": "r-2"}, ASK),
                (alice, {**ASK, "seed": 1}),
            ):
                await ask(gw, headers, fields)
            assert len(instance.requests) == 4
            stolen = {**bob, "X-Request-Id": "r-3", "Last-Event-ID": "1"}
            await ask(gw, stolen, status=410)

    run(work())


def test_an_answer_that_is_no_stream_is_given_once(keeps: GatewaySettings) -> None:
    plain = {"prompt": "x", "max_tokens": 3}

    async def work() -> None:
        instance = TokenInstance()
        async with rig(instance, settings=keeps) as gw:
            first, one = await ask(gw, NAMED, plain)
            second, two = await ask(gw, NAMED, plain)
            assert first == second == b'{"me": "attention-0"}'
            assert one.headers["Content-Type"] == two.headers["Content-Type"]
            assert len(instance.requests) == 1
            instance.status = 500
            await ask(gw, {"X-Request-Id": "r-2"}, plain, 500)  # an error is not kept
            await asyncio.sleep(0.2)
            instance.status = 200
            await ask(gw, {"X-Request-Id": "r-2"}, plain)

    run(work())


def test_without_an_id_nothing_is_kept(keeps: GatewaySettings) -> None:
    async def work() -> None:
        instance = TokenInstance()
        async with rig(instance, settings=keeps) as gw:
            await ask(gw, {})
            await ask(gw, {"Last-Event-ID": "3"})  # of an answer that has no name
            assert len(instance.requests) == 2 and used(gw) == 0

    run(work())


def test_an_answer_that_cannot_go_on_ends_with_one_error(keeps: GatewaySettings) -> None:
    class Hides(TokenInstance):
        def _choice(self, *args: object) -> dict:
            return {**super()._choice(*args), "token_ids": None}

    async def work() -> None:
        instance = Hides(die_after=2, how="hang")
        async with rig(instance, settings=keeps) as gw:
            await begin(gw, 2, NAMED)
            text, _ = await ask(gw, NAMED)
            *before, error, end = text.split(b"\n\n")
            assert len(before) == 2 and end == b""
            message = json.loads(error.removeprefix(b"data: "))["error"]["message"]
            assert message == (
                "the connection of the client broke; this answer cannot go on elsewhere"
            )

    run(work())


def test_the_stream_of_an_open_connection_is_left_alone(keeps: GatewaySettings) -> None:
    """Its client may be gone, or may have sent the request twice."""

    async def work() -> None:
        instance = TokenInstance()
        async with rig(instance, settings=keeps) as gw:
            long = {**ASK, "max_tokens": 200}
            old = await gw.client.post(gw.url + TEXT, json=long, headers=NAMED)
            first = await old.content.readany()
            new, _ = await ask(gw, NAMED, long)
            assert texts(new) == texts(first + await old.read()) == whole(long)
            assert len(instance.requests) == 2

    run(work(), 30.0)


def test_answers_are_removed_after_their_time(keeps: GatewaySettings) -> None:
    async def work() -> None:
        async with rig(TokenInstance(), settings=replace(keeps, resume_s=0.3)) as gw:
            await ask(gw, NAMED)
            assert used(gw) == 1
            while used(gw):
                await asyncio.sleep(0.02)
            await ask(gw, {**NAMED, "Last-Event-ID": "1"}, status=410)

    run(work())


HEAD = Head(200, (("Content-Type", "text/event-stream"),), streamed=True)


def name(word: str) -> bytes:
    return word.encode() * 20


def part(memory: int, process: int = 0, keep_s: float = 60.0) -> Answers:
    return Answers(memory, process, 2, keep_s=keep_s)


def keep(answers: Answers, word: str, *events: bytes) -> Keeper:
    keeper = Keeper(answers, Wish(name(word), "r"))
    for event in events:
        keeper.stream(HEAD, event)
    return keeper


def kept_body(answers: Answers, word: str) -> bytes | None:
    found = answers.read(name(word))
    assert found is None or found.head == HEAD
    return None if found is None else found.body


def test_an_answer_of_any_length_is_read_by_the_other_process(memory: int) -> None:
    async def work() -> None:
        one, two = part(memory), part(memory, 1)
        events = [b"data: %d %b\n\n" % (i, b"x" * 1000) for i in range(40)]  # three slots
        keeper = keep(one, "a", *events)
        assert kept_body(two, "a") == b"".join(events) and one.used == 3 and two.used == 0
        keeper.stream(HEAD, b"data: half")  # the rest was not written
        assert kept_body(two, "a") == b"".join(events)
        assert kept_body(two, "b") is None
        newer = keep(two, "a", b"data: newer\n\n")  # the client has come back there
        assert kept_body(one, "a") == kept_body(two, "a") == b"data: newer\n\n"
        for each in (keeper, newer):
            each.close()
        for each in (one, two):
            each.close()

    run(work())


def test_the_oldest_ended_answers_give_way_and_running_ones_stop_being_kept(memory: int) -> None:
    async def work() -> None:
        answers = part(memory)
        for word in "abcd":
            keep(answers, word, b"data: x\n\n").close()
        running = keep(answers, "e", b"data: y\n\n")
        assert [kept_body(answers, word) is None for word in "abcde"] == [True] + [False] * 4
        running.stream(HEAD, b"z" * 4 * SLOT + b"\n\n")  # more than there is
        assert answers.used == 0 and kept_body(answers, "e") is None
        running.stream(HEAD, b"more\n\n")
        running.close()
        keep(answers, "f", b"z" * 5 * SLOT + b"\n\n").close()
        assert answers.used == 0
        answers.close()

    run(work())


@pytest.mark.parametrize("gone", range(4))
def test_names_in_the_same_place_of_the_table_are_told_apart(memory: int, gone: int) -> None:
    async def work() -> None:
        answers = part(memory)
        alike = [bytes(8) + name(word)[8:] for word in "abcd"]
        chains = [answers.begin(each, HEAD, b"data: %b\n\n" % each[-1:]) for each in alike]
        chain = chains[gone]
        assert chain is not None
        answers.remove(chain.slots)
        found = [answers.read(each) for each in alike]
        assert [kept and kept.body for kept in found] == [
            None if i == gone else b"data: %b\n\n" % each[-1:] for i, each in enumerate(alike)
        ]
        again = part(memory)  # the next process enters them anew
        assert [again.read(each) == kept for each, kept in zip(alike, found, strict=True)] == [
            True
        ] * 4
        answers.close()
        again.close()

    run(work())


def test_a_new_process_removes_what_its_predecessor_left(memory: int) -> None:
    async def work() -> None:
        before, other = part(memory), part(memory, 1)
        keep(before, "a", b"data: " + b"x" * SLOT + b"\n\n")
        keep(other, "b", b"data: 1\n\n")
        after = part(memory, keep_s=0.2)
        assert after.used == 2 and kept_body(after, "a") is not None
        while after.used:
            await asyncio.sleep(0.02)
        assert kept_body(after, "a") is None and kept_body(after, "b") == b"data: 1\n\n"
        for each in (before, other, after):
            each.close()

    run(work())


def names() -> Iterator[bytes | None]:
    for method, target, headers, body, client in (
        ("POST", TEXT, NAMED, b"{}", "alice"),
        ("POST", TEXT, NAMED, b"{}", "bob"),
        ("POST", TEXT, NAMED, b"{ }", "alice"),
        ("POST", CHAT, NAMED, b"{}", "alice"),
        ("POST", TEXT + "?a=1", NAMED, b"{}", "alice"),
        ("POST", TEXT, {"X-Request-Id": "../../etc/passwd"}, b"{}", "alice"),
        ("POST", TEXT, {"X-Request-Id": "1"}, b"{}", "alicer-"),  # no part runs into the next
        ("GET", TEXT, NAMED, b"{}", "alice"),
        ("POST", "/v1/load_lora_adapter", NAMED, b"{}", "alice"),
        ("POST", TEXT, {}, b"{}", "alice"),
        ("POST", TEXT, NAMED, b"x" * (8 * 2**20 + 1), "alice"),
    ):
        wish = wish_of(method, target, headers, body, client)
        yield None if wish is None else wish.name


def test_names_of_answers_tell_nothing_and_differ_with_the_request() -> None:
    found = list(names())
    assert found == [*found[:7], *[None] * 4] and len(set(found[:7])) == 7
    assert all(name is not None and len(name) == 20 for name in found[:7])


@pytest.mark.parametrize("last", ["x", "-1", "1" * 12, "²"])
def test_a_number_that_is_none_is_refused(last: str) -> None:
    with pytest.raises(GatewayError, match="must be the number of an event"):
        wish_of("POST", TEXT, {**NAMED, "Last-Event-ID": last}, b"{}", "")


def test_events_are_numbered() -> None:
    assert numbered(b"a\n\nb\n\nhalf", 4) == b"id: 5\na\n\nid: 6\nb\n\nhalf"
    assert rest_of(b"a\n\nb\n\n", Wish(b"", "", 1, True)) == (b"id: 2\nb\n\n", 2)
    assert rest_of(b"a\n\nb\n\n", Wish(b"", "")) == (b"a\n\nb\n\n", 2)
