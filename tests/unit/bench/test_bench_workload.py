"""The workload: the same by seed, with the shape it promises; the client against a small server."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from aiohttp import web

from afd.errors import AfdError
from afd_bench.workload import (
    FIRST_TOKEN,
    Answer,
    Request,
    first_difference,
    followers,
    matching,
    mixed,
    parse_answer,
    reordered,
    run,
    run_sequentially,
)

VOCAB = 2048


def test_the_same_seed_gives_the_same_requests() -> None:
    assert mixed(3, vocab=VOCAB) == mixed(3, vocab=VOCAB)
    assert mixed(3, vocab=VOCAB) != mixed(4, vocab=VOCAB)


@pytest.mark.parametrize("seed", range(5))
def test_a_set_has_what_it_promises(seed: int) -> None:
    requests = mixed(seed, vocab=VOCAB, count=24, spread_s=0.6)
    lengths = [len(r.prompt) for r in requests]
    assert len(requests) == 24
    assert (min(lengths), max(lengths)) == (3, 200)
    assert len(set(lengths)) > 8
    assert all(FIRST_TOKEN <= token < VOCAB for r in requests for token in r.prompt)
    assert all(12 <= r.new_tokens <= 40 for r in requests)
    assert all(0.0 <= r.arrival_s <= 0.6 for r in requests)
    assert len({r.arrival_s for r in requests}) > 8
    prefixes = [r for r in requests if r.prompt[:96] == requests[6].prompt[:96]]
    times = [r.arrival_s for r in prefixes]
    assert len(prefixes) == 8
    assert times.count(0.15) == 5  # together
    assert sum(time >= 0.3 for time in times) == 3  # later
    assert len({r.prompt for r in requests}) == 24


def test_a_set_too_small_for_its_fixed_part_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 14"):
        mixed(0, vocab=VOCAB, count=13)


def test_followers_share_the_prefix_of_a_prompt_that_came_just_before() -> None:
    requests = followers(0, vocab=VOCAB, waves=2)
    assert requests == followers(0, vocab=VOCAB, waves=2)
    assert len(requests) == 22
    for wave in (requests[:11], requests[11:]):
        short, leader, rest = wave[:6], wave[6], wave[7:]
        assert all(r.arrival_s < leader.arrival_s and r.new_tokens <= 8 for r in short)
        assert all(r.arrival_s > leader.arrival_s for r in rest)
        assert {r.prompt[:192] for r in rest} == {leader.prompt[:192]}
        assert len({r.prompt for r in wave}) == 11
    assert requests[6].prompt[:192] != requests[17].prompt[:192]


def test_reordering_changes_arrivals_only() -> None:
    requests = mixed(0, vocab=VOCAB)
    other = reordered(requests, 1)
    assert [r.prompt for r in other] == [r.prompt for r in requests]
    assert sorted(r.arrival_s for r in other) == sorted(r.arrival_s for r in requests)
    assert [r.arrival_s for r in other] != [r.arrival_s for r in requests]
    assert other == reordered(requests, 1)


def test_matching_and_first_difference() -> None:
    a, b = Answer((1, 2, 3), (1.0,) * 3), Answer((1, 9, 3), (1.0,) * 3)
    assert matching([a, a], [a, b]) == 0.5
    assert first_difference(a, b) == 1
    assert first_difference(a, a) is None


def test_parsing_an_answer() -> None:
    tops = [{"token_id:7": -0.5, "token_id:9": -2.0}, {"a": -3.0, "b": -1.0, "c": -1.25}]
    answer = parse_answer({"token_ids": [7, 8], "logprobs": {"top_logprobs": tops}})
    assert answer == Answer((7, 8), (1.5, 0.25))
    with pytest.raises(AfdError, match="token_ids"):
        parse_answer({"text": "x", "logprobs": None})


class FakeServer:
    """Answers prompt tokens plus 1, and remembers what it was asked and how much at a time."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.most = self._running = 0
        self.status = 200
        self.short = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self._running += 1
        self.most = max(self.most, self._running)
        await asyncio.sleep(0.02)
        self._running -= 1
        if self.status != 200:
            return web.Response(status=self.status, text="no\n  room")
        tokens = [body["prompt"][0] + 1] * (body["max_tokens"] - self.short)
        top = [{"token_id:1": -1.0, "token_id:2": -2.0}] * len(tokens)
        choice = {"token_ids": tokens, "logprobs": {"top_logprobs": top}}
        return web.json_response({"choices": [choice]})


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake, loop, ready = FakeServer(), asyncio.new_event_loop(), threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/v1/completions", fake.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(5)
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join(5)


REQUESTS = [Request((10, 11), 3, 0.03), Request((20,), 2, 0.0), Request((30,), 1, 0.0)]


def test_answers_come_in_the_order_of_the_requests(server: FakeServer) -> None:
    answers = run(server.url, "m", REQUESTS, salt="s")
    assert [a.tokens for a in answers] == [(11,) * 3, (21,) * 2, (31,)]
    assert [body["prompt"] for body in server.bodies][2] == [10, 11]  # it arrives last
    assert server.most > 1
    body = server.bodies[0]
    assert body["model"] == "m"
    assert body["cache_salt"] == "s"
    assert body["temperature"] == 0
    assert body["ignore_eos"] and body["return_token_ids"]


def test_one_at_a_time(server: FakeServer) -> None:
    answers = run_sequentially(server.url, "m", REQUESTS, salt="s")
    assert [a.tokens[0] for a in answers] == [11, 21, 31]
    assert server.most == 1


def test_a_refused_request_is_named(server: FakeServer) -> None:
    server.status = 503
    with pytest.raises(AfdError, match="returned 503: no room"):
        run(server.url, "m", REQUESTS, salt="s")


def test_a_short_answer_is_an_error(server: FakeServer) -> None:
    server.short = 1
    with pytest.raises(AfdError, match="generated 2 tokens instead of 3"):
        run_sequentially(server.url, "m", REQUESTS, salt="s")


def test_no_server_is_an_error_with_a_remedy() -> None:
    with pytest.raises(AfdError, match="see its log"):
        run("http://127.0.0.1:9", "m", REQUESTS[:1], salt="s")
