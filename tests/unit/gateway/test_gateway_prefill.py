"""Prompts are computed at prefill instances; whatever happens to these, the client is served."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from aiohttp import web
from gateway_fakes import QUICK, FakeInstance, Rig, rig, run
from token_fakes import TokenInstance, events_of

from afd.control.messages import Member, Members
from afd_gateway.errors import GatewayError
from afd_gateway.main import ControlProvider
from afd_gateway.prefill import check_client, prompt_body, with_transfer
from afd_gateway.replay import CHAT, RESUME, TEXT
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Condition, Upstream

PARAMS = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "e"}
ASK = {"prompt": "x", "stream": True, "max_tokens": 5}
SPLIT = replace(QUICK, prefill_urls=("http://set",))  # the rig's members take its place


@dataclass(eq=False)
class PrefillInstance(FakeInstance):
    """Computes prompts as vLLM with a KV connector does.

    status: of its answers. params: what it says of the KV cache. hold: it waits for ``go_on``.
    """

    id: str = "prefill-0"
    status: int = 200
    params: object = field(default_factory=lambda: PARAMS)
    hold: bool = False

    def upstream(self, generation: int = 0, state: str = "ready") -> Upstream:
        return replace(super().upstream(generation, state), task="prefill")

    async def _plain(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.hold:
            await self.go_on.wait()
        body = {"choices": [{"text": "t"}], "kv_transfer_params": self.params}
        return web.json_response(body, status=self.status)

    @property
    def asked(self) -> list[dict]:
        return [json.loads(body) for body in self.bodies]


async def ask(gw: Rig, fields: dict = ASK) -> bytes:
    path = CHAT if "messages" in fields else TEXT
    async with gw.client.post(gw.url + path, json=fields) as answer:
        assert answer.status == 200
        return await answer.content.read()


def tokens_of(text: bytes) -> list[str]:
    return [body["choices"][0]["text"] for body in events_of(text) if body["choices"]]


async def counted(gw: Rig) -> dict[str, float]:
    async with gw.client.get(f"{gw.url}/metrics") as page:
        lines = (await page.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith("afd_gateway_prefills_total"):
            found[line.split('result="')[1].split('"')[0]] = float(line.split()[-1])
    return {result: count for result, count in found.items() if count}


def test_a_prefill_instance_computes_the_prompt_and_the_attention_instance_the_answer() -> None:
    async def work() -> None:
        prefill, attention = PrefillInstance(), TokenInstance()
        async with rig(prefill, attention, settings=SPLIT) as gw:
            fields = {**ASK, "stream_options": {"include_usage": True}, "temperature": 0}
            text = await ask(gw, fields)
            assert len(tokens_of(text)) == 5 and b"kv_transfer_params" not in text
            (asked,), (request,) = prefill.asked, attention.requests
            assert asked == {
                "prompt": "x",
                "max_tokens": 1,
                "temperature": 0,
                "kv_transfer_params": asked["kv_transfer_params"],
            }
            assert asked["kv_transfer_params"]["do_remote_decode"] is True
            assert request == {**fields, "return_token_ids": True, "kv_transfer_params": PARAMS}
            assert await counted(gw) == {"moved": 1}

    run(work())


@pytest.mark.parametrize(
    "broken",
    [
        {"die": "before"},
        {"status": 500},
        {"status": 400},
        {"params": None},
    ],
)
def test_without_a_prefill_instance_the_attention_instance_computes_the_prompt(
    broken: dict,
) -> None:
    async def work() -> None:
        prefill, attention = PrefillInstance(**broken), TokenInstance()
        async with rig(prefill, attention, settings=SPLIT) as gw:
            assert len(tokens_of(await ask(gw))) == 5
            (request,) = attention.requests
            assert "kv_transfer_params" not in request
            counts = await counted(gw)
            fails = broken.get("status", 200) >= 500 or "die" in broken
            assert counts == {"local": 1, **({"failed": 1} if fails else {})}

    run(work())


def test_the_next_prefill_instance_takes_over_from_one_that_died() -> None:
    async def work() -> None:
        dead, second = PrefillInstance(die="before"), PrefillInstance("prefill-1")
        attention = TokenInstance()
        async with rig(dead, second, attention, settings=SPLIT) as gw:
            dead.health = 503
            for _ in range(2):
                await ask(gw)
            assert [r["kv_transfer_params"] for r in attention.requests] == [PARAMS] * 2
            assert len(second.asked) == 2
            assert (await counted(gw))["moved"] == 2

    run(work())


def test_a_prefill_instance_that_answers_no_probe_is_given_up() -> None:
    async def work() -> None:
        stuck, attention = PrefillInstance(hold=True), TokenInstance()
        async with rig(stuck, attention, settings=replace(SPLIT, abandon_after_s=0.2)) as gw:
            asking = asyncio.create_task(ask(gw))
            await stuck.arrived.wait()
            stuck.health = 503
            assert len(tokens_of(await asking)) == 5
            assert stuck.aborted.is_set()

    run(work())


def test_a_client_that_goes_away_ends_the_request_at_the_prefill_instance() -> None:
    async def work() -> None:
        prefill, attention = PrefillInstance(hold=True), TokenInstance()
        async with rig(prefill, attention, settings=SPLIT) as gw:
            asking = asyncio.create_task(ask(gw))
            await prefill.arrived.wait()
            asking.cancel()
            await prefill.aborted.wait()
            assert attention.requests == []
            views = gw.server.gateway.pool.views()
            assert [view.outstanding for view in views] == [0, 0]

    run(work())


def test_an_answer_whose_instance_dies_goes_on_without_a_prefill_instance() -> None:
    async def work() -> None:
        prefill = PrefillInstance()
        first, second = TokenInstance(die_after=2), TokenInstance("attention-1")
        async with rig(prefill, first, second, settings=SPLIT) as gw:
            assert len(tokens_of(await ask(gw))) >= 5
            (request,) = second.requests
            assert RESUME in request["vllm_xargs"] and "kv_transfer_params" not in request
            assert len(prefill.asked) == 1

    run(work())


def test_an_attention_instance_that_prefills_gets_no_other_requests() -> None:
    async def work() -> None:
        first, second = PrefillInstance("attention-1"), TokenInstance()
        async with rig(first, second, settings=replace(SPLIT, waiting_s=0.0)) as gw:
            await ask(gw)
            assert len(first.asked) == len(second.requests) == 1
            await second.stop()
            async with gw.client.post(gw.url + TEXT, json=ASK) as answer:
                assert answer.status in (502, 503)
            assert len(first.asked) <= 2
            async with gw.client.get(f"{gw.url}/health") as answer:
                reason = (await answer.json())["reason"]
            assert "attention-1 computes prompts only" in reason

    run(work())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"x","kv_transfer_params":{"remote_host":"h"}}',
        b'{"prompt":"x","kv\\u005ftransfer_params":{"remote_host":"h"}}',
        b'{"prompt":"x","vllm_xargs":{"kv_transfer_params":"h"}}',
        '{"prompt":"x","kv_transfer_params":{"remote_host":"h"}}'.encode("utf-16"),
        b'{"kv_transfer_params":{}, "prompt":"' + b"x" * 9 * 2**20 + b'"}',
    ],
)
def test_clients_must_not_name_a_kv_cache(body: bytes) -> None:
    async def work() -> None:
        attention = TokenInstance()
        async with rig(attention, settings=SPLIT) as gw:
            headers = {"Content-Type": "application/json"}
            for path in (TEXT, CHAT, "/v1/responses"):
                async with gw.client.post(gw.url + path, data=body, headers=headers) as answer:
                    error = await gw.error(answer)
                    assert answer.status == 400 and "set by the gateway" in str(error["message"])
            assert attention.requests == attention.bodies == []

    run(work())


def test_a_client_may_write_about_kv_caches() -> None:
    check_client(b'{"prompt":"what are kv_transfer_params? \\u00e4"}')
    check_client(b'{"prompt": broken kv_transfer_params')
    with pytest.raises(GatewayError, match="set by the gateway"):
        check_client(b'{"kv_transfer_params":null,"prompt":"x"}')


@pytest.mark.parametrize(
    ("path", "fields", "moves"),
    [
        (TEXT, {"prompt": "x"}, True),
        (TEXT, {"prompt": [1, 2, 3]}, True),
        (TEXT, {"prompt": ["x", "y"]}, False),
        (TEXT, {"prompt": [[1], [2]]}, False),
        (TEXT, {"prompt": "x", "n": 2}, False),
        (TEXT, {"prompt": "x", "n": 1, "best_of": None}, True),
        (TEXT, {"prompt": "x", "echo": True}, False),
        (TEXT, {"prompt": "x", "prompt_logprobs": 0}, False),
        (TEXT, {"prompt": "x", "use_beam_search": True}, False),
        (CHAT, {"messages": []}, True),
        ("/v1/responses", {"input": "x"}, False),
    ],
)
def test_which_prompts_move(path: str, fields: dict, moves: bool) -> None:
    assert (prompt_body(path, json.dumps(fields).encode()) is not None) is moves


@pytest.mark.parametrize(
    "body", [b"", b"[1]", b"{", b"{}", b'"prompt"', '{"prompt": "x"}'.encode("utf-16")]
)
def test_bodies_that_are_no_requests_do_not_move(body: bytes) -> None:
    assert prompt_body(TEXT, body) is None


def test_a_chat_asks_for_one_token_whatever_it_says() -> None:
    fields = {"messages": [1], "max_completion_tokens": 9, "max_tokens": 7, "tools": [2]}
    asked = json.loads(prompt_body(CHAT, json.dumps({**fields, "logprobs": True}).encode()) or b"")
    transfer = asked.pop("kv_transfer_params")
    assert asked == {**fields, "max_completion_tokens": 1, "max_tokens": 1}
    assert transfer["do_remote_decode"] is True
    assert json.loads(with_transfer(b' {"a": 1}', {"b": 2})) == {
        "a": 1,
        "kv_transfer_params": {"b": 2},
    }


def test_the_gateway_knows_prefill_instances_from_its_settings() -> None:
    class Client:
        members = Members(members=tuple(Member("attention", i, 1, state="ready") for i in (0, 1)))

    settings = GatewaySettings(prefill_urls=("http://h:1",), prefill_ids=frozenset({"attention-1"}))
    provider = ControlProvider(Client(), settings)  # type: ignore[arg-type]
    assert {u.id: u.task for u in provider()} == {
        "attention-0": "generate",
        "attention-1": "prefill",
        "prefill-0": "prefill",
    }


def test_without_prefill_instances_a_request_passes_unchanged() -> None:
    async def work() -> None:
        attention = FakeInstance()
        async with rig(attention) as gw:
            body = b'{"prompt":"x", "kv_transfer_params": {"a":1}}'
            headers = {"Content-Type": "application/json"}
            async with gw.client.post(gw.url + TEXT, data=body, headers=headers) as answer:
                assert answer.status == 200
            assert attention.bodies == [body]
            assert gw.condition("attention-0") is Condition.HEALTHY

    run(work())


def test_a_prefill_instance_that_refuses_connections_is_passed_over() -> None:
    async def work() -> None:
        gone, attention = PrefillInstance(), TokenInstance()
        async with rig(gone, attention, settings=SPLIT) as gw:
            await gone.stop()
            await ask(gw)
            await gw.until("prefill-0", Condition.UNHEALTHY)
            await ask(gw)
            assert all("kv_transfer_params" not in r for r in attention.requests)
            assert isinstance(gw.client, aiohttp.ClientSession)

    run(work())
