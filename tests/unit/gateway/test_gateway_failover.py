"""Begun answers whose attention instance dies go on elsewhere; the client sees one answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import aiohttp
import pytest
from gateway_fakes import QUICK, FakeInstance, Rig, rig, run
from token_fakes import TokenInstance, events_of

from afd_gateway.replay import CHAT, TEXT
from afd_gateway.upstreams import Condition

ASK = {"prompt": "x", "stream": True, "max_tokens": 9}
TALK = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 9}


async def ask(gw: Rig, fields: dict) -> bytes:
    path = CHAT if "messages" in fields else TEXT
    async with gw.client.post(gw.url + path, json=fields) as answer:
        assert answer.status == 200
        return await answer.content.read()


async def undisturbed(fields: dict) -> bytes:
    async with rig(TokenInstance("attention-0")) as gw:
        return await ask(gw, fields)


def same(one: bytes, other: bytes) -> None:
    """Both answers say the same; the number of events may differ."""

    def said(text: bytes) -> dict:
        found: dict = {}
        for body in events_of(text):
            for choice in body["choices"]:
                into = found.setdefault(choice["index"], ["", [], [], None])
                into[0] += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                into[1] += choice.get("token_ids") or []
                into[2] += (choice.get("logprobs") or {}).get("tokens", [])
                into[3] = into[3] or choice["finish_reason"]
            if "usage" in body:
                assert "usage" not in found
                found["usage"] = body["usage"]
        return found

    assert said(one) == said(other)
    assert len({(body["id"], body["created"]) for body in events_of(one)}) == 1
    roles = [
        b for b in events_of(one) if b["choices"] and "role" in b["choices"][0].get("delta", {})
    ]
    others = [
        b for b in events_of(other) if b["choices"] and "role" in b["choices"][0].get("delta", {})
    ]
    assert len(roles) == len(others)


@pytest.mark.parametrize("how", ["reset", "event", "abort", "end"])
@pytest.mark.parametrize(
    "fields",
    [
        ASK,
        TALK,
        {**ASK, "n": 3, "stream_options": {"include_usage": True}},
        {**TALK, "n": 2, "logprobs": 2, "stream_options": {"include_usage": True}},
        {**ASK, "return_token_ids": True, "logprobs": 1},
        {**ASK, "return_token_ids": False},
    ],
)
@pytest.mark.parametrize("after", [0, 4, 12])
def test_the_client_sees_one_answer(how: str, fields: dict, after: int) -> None:
    async def work() -> None:
        first = TokenInstance("attention-0", die_after=after, how=how)
        second = TokenInstance("attention-1")
        async with rig(first, second) as gw:
            text = await ask(gw, fields)
            dies = after < fields.get("n", 1) * fields["max_tokens"]
            assert len(second.requests) == dies
            same(text, await undisturbed(fields))
            if not fields.get("return_token_ids"):
                assert b'"token_ids":[' not in text.replace(b'\\"token_ids\\":[', b"")
            assert gw.server.gateway.pool.waiting == 0

    run(work())


def test_the_second_instance_gets_the_tokens_and_not_more_work_than_the_rest() -> None:
    async def work() -> None:
        first, second = TokenInstance(die_after=4), TokenInstance("attention-1")
        async with rig(first, second) as gw:
            await ask(gw, {**ASK, "vllm_xargs": {"mine": 1}, "temperature": 0.7})
            (request,) = second.requests
            told = json.loads(request["vllm_xargs"]["afd_resume"])
            assert told == {"stepwise": False, "choices": {"0": [[0, 7, 14, 21], False]}}
            assert request["vllm_xargs"]["mine"] == 1 and request["max_tokens"] == 9
            async with gw.client.get(f"{gw.url}/metrics") as page:
                text = await page.text()
            assert 'afd_gateway_replays_total{cause="closed",instance="gateway-0"} 1.0' in text
            assert 'afd_gateway_retries_total{cause="closed",instance="gateway-0"} 0.0' in text

    run(work())


def test_an_answer_survives_any_number_of_deaths_that_leave_it_a_token() -> None:
    async def work() -> None:
        instances = [TokenInstance(f"attention-{i}", die_after=2) for i in range(3)]
        async with rig(*instances) as gw:
            same(await ask(gw, ASK), await undisturbed(ASK))
            assert sum(len(instance.requests) for instance in instances) == 5

    run(work())


def test_an_answer_that_fails_two_instances_at_one_token_ends_with_one_error() -> None:
    async def work() -> None:
        instances = [TokenInstance(f"attention-{i}", die_after=4 * (not i)) for i in range(3)]
        async with rig(*instances) as gw:
            first = instances[0].upstream()
            for instance in instances[1:]:
                instance.die_after = 0
            text = await ask(gw, ASK)
            assert text.count(b'"error"') == 1 and b"failed while it answered" in text
            assert [len(instance.requests) for instance in instances] == [1, 1, 0], first

    run(work())


@pytest.mark.parametrize("deterministic", [{"temperature": 0}, {"seed": 3}])
@pytest.mark.parametrize("merged", [1, 3])
def test_an_instance_that_cannot_resume_answers_from_the_start(
    deterministic: dict, merged: int
) -> None:
    """The client gets only what it lacks, also if an event holds more than that."""

    async def work() -> None:
        fields = {**ASK, **deterministic, "logprobs": 1}
        second = TokenInstance("attention-1", resumes=False, merged=merged)
        async with rig(TokenInstance(die_after=4), second) as gw:
            same(await ask(gw, fields), await undisturbed(fields))

    run(work())


def test_an_answer_that_departs_ends_with_one_error() -> None:
    async def work() -> None:
        second = TokenInstance("attention-1", resumes=False, salt=5)
        async with rig(TokenInstance(die_after=4), second) as gw:
            text = await ask(gw, ASK)
            assert text.count(b'"error"') == 1 and b"the tokens differ" in text
            assert text.count(b'"text"') == 4

    run(work())


def test_an_error_of_the_request_is_passed_on() -> None:
    async def work() -> None:
        first, second = TokenInstance(die_after=2, how="refuse"), TokenInstance("attention-1")
        async with rig(first, second) as gw:
            text = await ask(gw, ASK)
            assert text.count(b'"error"') == 1 and b'"code": 400' in text
            assert not second.requests

    run(work())


def test_without_memory_an_answer_ends_with_one_error() -> None:
    async def work() -> None:
        first, second = TokenInstance(die_after=4), TokenInstance("attention-1")
        async with rig(first, second, settings=replace(QUICK, replay_bytes=300)) as gw:
            text = await ask(gw, ASK)
            assert text.count(b'"error"') == 1 and b"cannot go on elsewhere" in text
            assert not second.requests

    run(work())


@pytest.mark.parametrize("status", [500, 503])
def test_an_answer_with_a_server_error_is_asked_for_elsewhere(status: int) -> None:
    async def work() -> None:
        first, second = TokenInstance(status=status), TokenInstance("attention-1")
        async with rig(first, second) as gw:
            body = {"prompt": "x", "max_tokens": 3}
            async with gw.client.post(gw.url + TEXT, json=body) as answer:
                assert (answer.status, await answer.json()) == (200, {"me": "attention-1"})
            second.status = status
            async with gw.client.post(gw.url + TEXT, json=body) as answer:  # vLLM's own words
                assert answer.status == status
                assert (await answer.json())["error"]["message"] == "EngineCore"

    run(work())


def test_a_whole_answer_that_breaks_off_is_asked_for_elsewhere() -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0", die="middle"), FakeInstance("attention-1")
        async with (
            rig(first, second) as gw,
            gw.client.get(f"{gw.url}/v1/partial") as answer,
        ):
            assert (answer.status, await answer.json()) == (200, {"some": 1})
            assert answer.headers["x-afd-instance"] == "attention-1"

    run(work())


def test_begun_and_new_requests_wait_for_the_only_instance() -> None:
    """It comes back as a new process with a new generation."""

    async def work() -> None:
        first = TokenInstance(die_after=4, ill_after=True)
        async with rig(first) as gw:
            begun = asyncio.ensure_future(ask(gw, ASK))
            await first.arrived.wait()
            await gw.until("attention-0", Condition.UNHEALTHY)
            await first.stop()
            gw.members.clear()
            fresh = asyncio.ensure_future(ask(gw, TALK))
            while gw.server.gateway.pool.waiting < 2:
                await asyncio.sleep(0.01)
            async with gw.client.get(f"{gw.url}/metrics") as page:
                waiting = 'afd_gateway_waiting_requests{instance="gateway-0"} 2.0'
                assert waiting in await page.text()
            second = TokenInstance("attention-0")
            await second.start()
            gw.members.append(second.upstream(generation=2))
            same(await begun, await undisturbed(ASK))
            same(await fresh, await undisturbed(TALK))
            await second.stop()

    run(work())


def test_only_so_many_requests_wait_and_only_so_long() -> None:
    async def work() -> None:
        tight = replace(QUICK, waiting=1, waiting_s=0.3, replay_s=0.6)
        first = TokenInstance(die_after=4, ill_after=True)
        async with rig(first, settings=tight) as gw:
            begun = asyncio.ensure_future(ask(gw, ASK))
            await gw.until("attention-0", Condition.UNHEALTHY)
            gw.members.clear()
            began = asyncio.get_running_loop().time()

            async def refused() -> float:
                async with gw.client.post(gw.url + TEXT, json=ASK) as answer:
                    assert answer.status == 503 and answer.headers["Retry-After"] == "5"
                    assert "no attention instance" in (await gw.error(answer))["message"]
                return asyncio.get_running_loop().time() - began

            times = sorted(await asyncio.gather(refused(), refused()))
            assert times[0] < 0.25 <= times[1]
            text = await begun
            assert text.count(b'"error"') == 1 and b"no attention instance is ready" in text
            assert gw.server.gateway.pool.waiting == 0

    run(work())


def test_a_request_that_the_instance_had_waits_as_long_as_a_begun_answer() -> None:
    async def work() -> None:
        first = TokenInstance(die_after=0, ill_after=True)
        async with rig(first, settings=replace(QUICK, waiting_s=0.1)) as gw:
            lost = asyncio.ensure_future(ask(gw, ASK))
            await first.arrived.wait()
            await gw.until("attention-0", Condition.UNHEALTHY)
            await first.stop()
            gw.members.clear()
            await asyncio.sleep(0.3)
            second = TokenInstance("attention-0")
            await second.start()
            gw.members.append(second.upstream(generation=2))
            same(await lost, await undisturbed(ASK))
            await second.stop()

    run(work())


def test_a_client_that_leaves_stops_waiting() -> None:
    async def work() -> None:
        first = TokenInstance(die_after=4, ill_after=True)
        async with rig(first) as gw:
            leaving = asyncio.ensure_future(ask(gw, ASK))
            await gw.until("attention-0", Condition.UNHEALTHY)
            gw.members.clear()
            while gw.server.gateway.pool.waiting != 1:
                await asyncio.sleep(0.01)
            leaving.cancel()
            while gw.server.gateway.pool.waiting:
                await asyncio.sleep(0.01)

    run(work())


def test_a_draining_deployment_refuses_at_once() -> None:
    async def work() -> None:
        first = TokenInstance()
        async with rig(first) as gw:
            gw.members[0] = first.upstream(state="draining")
            async with gw.client.post(gw.url + TEXT, json=ASK) as answer:
                assert answer.status == 503

    run(work(), 2.0)


def test_a_begun_answer_goes_on_at_a_draining_instance_if_there_is_no_other() -> None:
    async def work() -> None:
        first, second = TokenInstance(die_after=4, ill_after=True), TokenInstance("attention-1")
        async with rig(first, second) as gw:
            gw.members[1] = second.upstream(state="draining")
            same(await ask(gw, ASK), await undisturbed(ASK))
            assert len(second.requests) == 1

    run(work())


def test_an_instance_that_hangs_after_it_left_gives_its_answers_up() -> None:
    """SIGTERM: vLLM ends its engine, closes its listener, and says no more on open connections."""

    async def work() -> None:
        first = TokenInstance(die_after=4, how="hang")
        second = TokenInstance("attention-1")
        async with rig(first, second) as gw:
            asking = asyncio.ensure_future(ask(gw, ASK))
            await first.arrived.wait()
            first.close_listener()
            gw.members.remove(first.upstream())
            same(await asyncio.wait_for(asking, 3.0), await undisturbed(ASK))

    run(work())


def test_a_shutdown_ends_waiting_requests() -> None:
    async def work() -> None:
        first = TokenInstance(die_after=4, ill_after=True)
        async with rig(first) as gw:
            begun = asyncio.ensure_future(ask(gw, ASK))
            await gw.until("attention-0", Condition.UNHEALTHY)
            gw.members.clear()
            fresh = asyncio.ensure_future(gw.client.post(gw.url + TEXT, json=ASK))
            while gw.server.gateway.pool.waiting < 2:
                await asyncio.sleep(0.01)
            await gw.server.stop(0.1)
            assert b"the gateway is shutting down" in await begun
            answer = await fresh
            assert answer.status == 503
            answer.release()

    run(work())


def test_bodies_that_are_no_streams_of_tokens_pass_unchanged() -> None:
    async def work() -> None:
        instance = FakeInstance()
        instance.go_on.set()
        async with rig(instance) as gw:
            for body in (b'{"stream": false}', b"{", b'["stream"]', b'{"stream": true, "n": '):
                async with gw.client.post(gw.url + TEXT, data=body) as answer:
                    await answer.read()
                assert instance.bodies[-1] == body
            zipped = aiohttp.payload.BytesPayload(b'{"stream": true}')
            headers = {"Content-Encoding": "x-own"}
            async with gw.client.post(gw.url + TEXT, data=zipped, headers=headers) as answer:
                await answer.read()
            assert instance.bodies[-1] == b'{"stream": true}'

    run(work())


@pytest.mark.parametrize(
    ("how", "cause"),
    [("reset", "closed"), ("event", "error"), ("abort", "error"), ("end", "closed")],
)
def test_replays_are_counted_by_cause(how: str, cause: str) -> None:
    async def work() -> None:
        first, second = TokenInstance(die_after=4, how=how), TokenInstance("attention-1")
        async with rig(first, second) as gw:
            await ask(gw, ASK)
            async with gw.client.get(f"{gw.url}/metrics") as page:
                text = await page.text()
        assert f'afd_gateway_replays_total{{cause="{cause}",instance="gateway-0"}} 1.0' in text

    run(work())
