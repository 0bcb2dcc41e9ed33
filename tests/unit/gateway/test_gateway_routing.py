"""The choice of an instance by the beginning of a prompt and by load."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from gateway_fakes import QUICK, FakeInstance, rig, run
from hypothesis import given
from hypothesis import strategies as st

from afd_gateway.kv_load import usage_of
from afd_gateway.routing import Beginnings, Router, able, choose, prompt_of
from afd_gateway.upstreams import Condition, Health, Upstream, View

HEALTHY = Health(Condition.HEALTHY)


def view(index: int, busy: int = 0, elsewhere: int = 0, kv: float = 0.0, start: int = 1) -> View:
    upstream = Upstream(f"attention-{index}", f"http://h:{index}", generation=start)
    return View(upstream, HEALTHY, busy, elsewhere, kv)


def body(text: str, **more: object) -> bytes:
    return json.dumps(
        {**more, "messages": [{"role": "system", "content": text}], "model": "m"}
    ).encode()


LONG = "word " * 400


def test_prompts_that_begin_alike_share_their_first_blocks() -> None:
    one, two = prompt_of(body(LONG + "one" * 300)), prompt_of(body(LONG + "two" * 300))
    assert one[:3] == two[:3] and one != two and len(one) >= 4
    # Parameters are not part of the prompt, wherever they stand.
    assert prompt_of(body(LONG, temperature=0.5, max_tokens=9)) == prompt_of(body(LONG))
    assert prompt_of(body(LONG, cache_salt="a"))[0] != prompt_of(body(LONG, cache_salt="b"))[0]
    assert prompt_of(json.dumps({"prompt": LONG}).encode())
    assert prompt_of(json.dumps({"prompt": list(range(500))}).encode())


@given(st.one_of(st.binary(), st.binary().map(lambda data: b'{"prompt":"' + b"x" * 600 + data)))
def test_any_body_has_a_prompt(data: bytes) -> None:
    assert len(prompt_of(data)) <= 64


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[1]" * 300, b"[" * 5000, b'{"prompt":1}', b"\xff" * 600]
)
def test_a_body_without_a_prompt_has_no_blocks(data: bytes) -> None:
    assert prompt_of(data) in ((), prompt_of(b"{}"))


def test_the_instance_that_computed_the_beginning_is_chosen_unless_it_is_clearly_busier() -> None:
    router = Router("prefix")
    first = router.choose([view(0, busy=1), view(1)], body=body(LONG))
    assert first is not None and first.upstream.id == "attention-1"
    follower = body(LONG + "and more")
    for busy, chosen in ((0, 1), (4, 1), (5, 0)):
        found = Router.choose(router, [view(0), view(1, busy=busy)], body=follower)
        assert found is not None and found.upstream.index == chosen
        router = Router("prefix")
        router.choose([view(0, busy=1), view(1)], body=body(LONG))
    unrelated = router.choose([view(0), view(1, busy=1)], body=body("other " * 400))
    assert unrelated is not None and unrelated.upstream.index == 0


def test_requests_of_other_processes_count() -> None:
    chosen = Router("fewest").choose([view(0, busy=0, elsewhere=9), view(1, busy=3)])
    assert chosen is not None and chosen.upstream.index == 1


def test_processes_break_ties_differently_but_agree_on_a_prompt() -> None:
    views = [view(i) for i in range(3)]
    turns = [Router("fewest", turn=turn).choose(views) for turn in range(3)]
    assert [found.upstream.index for found in turns if found] == [0, 1, 2]
    for text in (LONG, "other " * 400, "third " * 300):
        chosen = {
            found.upstream.index
            for turn in range(3)
            if (found := Router("prefix", turn=turn).choose(views, body=body(text)))
        }
        assert len(chosen) == 1


def test_a_restarted_instance_has_no_beginnings() -> None:
    known = Beginnings()
    prompt = prompt_of(body(LONG))
    known.add(prompt, view(0).upstream.key)
    assert known.matches(prompt) == {view(0).upstream.key: len(prompt)}
    assert choose([view(0, start=2, busy=1), view(1)], known.matches(prompt), prompt) == view(1)
    known.forget(view(0).upstream.key)
    assert known.matches(prompt) == {}


def test_beginnings_are_bounded_and_the_oldest_are_forgotten() -> None:
    known = Beginnings(limit=8)
    prompts = [prompt_of(body(f"{i} " * 800)) for i in range(20)]
    for prompt in prompts:
        known.add(prompt[:2], view(0).upstream.key)
    assert known.matches(prompts[0]) == {}
    assert known.matches(prompts[-1]) == {view(0).upstream.key: 2}
    assert len(known._holders) == 8


def test_full_instances_are_left_out_while_others_have_room() -> None:
    assert able([view(0, kv=0.97), view(1, busy=9)]) == [view(1, busy=9)]
    assert able([view(0, kv=0.97), view(1, kv=0.99)]) == [view(0, kv=0.97), view(1, kv=0.99)]
    assert able([view(0, busy=8), view(1, busy=9)], limit=9) == [view(0, busy=8)]
    assert able([view(0, busy=9), view(1, busy=9)], limit=9) == [view(0, busy=9), view(1, busy=9)]


def test_the_usage_is_read_from_vllms_page() -> None:
    page = (
        b"# TYPE vllm:kv_cache_usage_perc gauge\n"
        b'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
        b'vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5\n'
    )
    assert usage_of(page) == 0.5 and usage_of(b"x 1\n") is None
    assert usage_of(b"vllm:kv_cache_usage_perc x\n") is None


def test_the_kv_usage_of_the_instances_is_followed() -> None:
    async def work() -> None:
        instances = [FakeInstance(f"attention-{i}") for i in range(2)]
        instances[0].metrics = 'vllm:kv_cache_usage_perc{engine="0"} 0.99\n'
        async with rig(*instances, settings=replace(QUICK, kv_interval_s=0.05)) as gw:
            usage = gw.server.gateway.pool.kv_usage
            key = instances[0].upstream().key
            while usage != {key: 0.99}:
                await asyncio.sleep(0.01)
            for _ in range(4):
                async with gw.client.post(f"{gw.url}/v1/x", data=body(LONG)) as answer:
                    assert (await answer.json())["me"] == "attention-1"
            gw.members.pop(0)
            while usage:
                await asyncio.sleep(0.01)

    run(work())


def test_a_served_prompt_returns_to_its_instance_and_full_ones_are_avoided() -> None:
    async def work() -> None:
        instances = [FakeInstance(f"attention-{i}") for i in range(2)]
        async with rig(*instances, settings=QUICK) as gw:

            async def ask(text: str) -> str:
                async with gw.client.post(f"{gw.url}/v1/chat/completions", data=body(text)) as got:
                    return (await got.json())["me"]

            homes = {text: await ask(text * 300) for text in ("a ", "b ", "c ", "d ")}
            assert set(homes.values()) == {"attention-0", "attention-1"}
            for _ in range(3):
                for text, home in homes.items():
                    assert await ask(text * 300) == home
            full = gw.server.gateway.pool
            full.kv_usage[instances[0].upstream().key] = 1.0
            assert {await ask(text * 300) for text in homes} == {"attention-1"}

    run(work())
