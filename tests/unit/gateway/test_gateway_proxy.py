"""Requests through a real gateway to fake instances: content, streams, failover, disconnects."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
from dataclasses import replace

import aiohttp
import pytest
from gateway_fakes import QUICK, FakeInstance, rig, run

from afd_gateway.upstreams import Condition, Upstream


@pytest.mark.parametrize("passed", [False, True])
def test_request_and_answer_pass_unchanged(passed: bool) -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(QUICK, pass_credentials=passed)) as gw:
            zipped = gzip.compress(b'{"model": "tiny"}')
            headers = {
                "X-Request-Id": "abc",
                "Authorization": "Bearer k",
                "Api-Key": "k",
                "Cookie": "a=b",
                "Content-Encoding": "gzip",
                "Content-Type": "application/json",
                "Connection": "keep-alive, X-Private",
                "X-Private": "1",
                "TE": "trailers",
                "User-Agent": "me",
            }
            target = "/v1/some%2Fthing?a=b%20c&a=d+e&empty="
            url = aiohttp.client.URL(gw.url + target, encoded=True)
            async with gw.client.post(url, data=zipped, headers=headers) as answer:
                assert answer.status == 200
                told = json.loads(await answer.read())
                assert answer.headers["x-afd-instance"] == "attention-0"
                assert answer.headers["X-Request-Id"] == "abc"
                assert answer.headers.getall("Set-Cookie") == ["a=1", "b=2"]
                assert "Keep-Alive" not in answer.headers
            assert instance.bodies == [zipped]  # passed on without decompression
            assert (told["method"], told["target"]) == ("POST", target)
            got = {key.lower(): value for key, value in told["headers"]}
            assert got.get("authorization") == ("Bearer k" if passed else None)
            assert not {"api-key", "cookie"} & set(got)
            assert got["content-encoding"] == "gzip"
            assert got["user-agent"] == "me"
            assert got["host"] == gw.url.removeprefix("http://")
            assert not {"x-private", "te"} & set(got)

    run(work())


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_every_method_and_unknown_paths_are_forwarded(method: str) -> None:
    async def work() -> None:
        async with rig(FakeInstance()) as gw:
            async with gw.client.request(method, f"{gw.url}/v1/missing") as answer:
                assert answer.status == 404
                words = "/v1/missing is not served, because the model generates text"
                assert words in (await gw.error(answer))["message"]
            for path in ("/v1/models", "/tokenize", "/detokenize", "/version", "/ping"):
                async with gw.client.request(method, gw.url + path) as answer:
                    assert (await answer.json())["target"] == path

    run(work())


def test_head_has_the_length_and_no_body() -> None:
    async def work() -> None:
        async with (
            rig(FakeInstance()) as gw,
            gw.client.head(f"{gw.url}/v1/models") as answer,
        ):
            assert answer.status == 200
            assert await answer.read() == b""

    run(work())


def test_events_arrive_one_by_one() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance) as gw, gw.client.post(f"{gw.url}/v1/stream") as answer:
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            assert answer.headers["X-Request-Id"] == "r-1"
            # The instance sends more only after the client has received the first event.
            assert await answer.content.readany() == b'data: {"n": 0}\n\n'
            instance.go_on.set()
            rest = await answer.content.read()
            assert rest == b'data: {"n": 1}\n\ndata: [DONE]\n\n'

    run(work())


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/wait"])
def test_a_client_that_leaves_ends_the_upstream_request(path: str) -> None:
    """The client leaves in mid-stream or before the first byte of the answer."""

    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance) as gw:
            host, port = gw.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(
                f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode()
            )
            await instance.arrived.wait()
            if path == "/v1/stream":
                assert b"200 OK" in await reader.readline()
            writer.close()
            await asyncio.wait_for(instance.aborted.wait(), 1.0)
            views = gw.server.gateway.pool.views()
            while views[0].outstanding:
                await asyncio.sleep(0.01)
                views = gw.server.gateway.pool.views()
            assert views[0].health.condition is Condition.HEALTHY  # the instance is not blamed
            async with gw.client.get(f"{gw.url}/metrics") as answer:
                assert 'code="499"' in await answer.text()

    run(work())


def test_a_client_that_leaves_after_the_last_event_counts_as_served() -> None:
    async def work() -> None:
        instance = FakeInstance(hold_end_s=5.0)
        instance.go_on.set()
        async with rig(instance) as gw:
            host, port = gw.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/stream HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
            await reader.readuntil(b"data: [DONE]\n\n")
            writer.close()
            await asyncio.wait_for(instance.aborted.wait(), 1.0)
            while gw.server.gateway.pool.views()[0].outstanding:
                await asyncio.sleep(0.01)
            async with gw.client.get(f"{gw.url}/metrics") as answer:
                page = await answer.text()
            assert 'code="200"' in page
            assert 'code="499"' not in page

    run(work())


@pytest.mark.parametrize("die", ["before", "head"])
def test_a_request_lost_before_the_first_byte_is_sent_elsewhere(die: str) -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0", die=die), FakeInstance("attention-1")
        second.go_on.set()
        async with rig(first, second) as gw:
            body = b'{"stream": true}'
            async with gw.client.post(f"{gw.url}/v1/stream", data=body) as answer:
                assert answer.status == 200
                assert answer.headers["x-afd-instance"] == "attention-1"
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            assert first.bodies == second.bodies == [body]
            async with gw.client.get(f"{gw.url}/metrics") as answer:
                counted = 'afd_gateway_retries_total{cause="closed",instance="gateway-0"} 1.0'
                assert counted in await answer.text()
            await gw.until("attention-0", Condition.HEALTHY)  # once /health succeeds again

    run(work())


def test_refused_connection_is_retried_and_the_instance_unused_until_healthy() -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0"), FakeInstance("attention-1")
        calm = replace(QUICK, probe_interval_s=0.3)
        async with rig(first, second, settings=calm) as gw:
            await first.stop()
            for _ in range(2):
                async with gw.client.post(f"{gw.url}/v1/completions", data=b"{}") as answer:
                    assert (await answer.json())["me"] == "attention-1"
            assert gw.condition("attention-0") is Condition.UNHEALTHY
            await first.start()
            await gw.until("attention-0", Condition.HEALTHY)
            async with gw.client.post(f"{gw.url}/v1/completions", data=b"{}") as answer:
                assert (await answer.json())["me"] == "attention-0"

    run(work())


def test_a_request_that_killed_two_instances_is_not_sent_to_a_third() -> None:
    async def work() -> None:
        instances = [FakeInstance(f"attention-{i}", die="before") for i in range(3)]
        async with rig(*instances) as gw:
            async with gw.client.post(f"{gw.url}/v1/completions", data=b"{}") as answer:
                assert answer.status == 502
                assert "attention-1 failed" in (await gw.error(answer))["message"]
            assert [len(instance.seen) for instance in instances] == [1, 1, 0]

    run(work())


def test_death_in_mid_stream_ends_with_one_complete_error_event() -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0", die="middle"), FakeInstance("attention-1")
        async with rig(first, second) as gw, gw.client.post(f"{gw.url}/v1/stream") as answer:
            assert answer.status == 200
            text = await answer.read()  # no exception: the body ends properly
            events = [event for event in text.split(b"\n\n") if event]
            assert events[0] == b'data: {"n": 0}'
            assert len(events) == 2  # the incomplete event was not forwarded
            error = json.loads(events[1].removeprefix(b"data: "))["error"]
            assert error["code"] == 502 and "attention-0 failed" in error["message"]
            assert not second.seen

    run(work())


def test_death_inside_a_json_answer_is_a_502() -> None:
    async def work() -> None:
        async with (
            rig(FakeInstance(die="middle")) as gw,
            gw.client.get(f"{gw.url}/v1/partial") as answer,
        ):
            assert answer.status == 502
            assert answer.headers["x-afd-instance"] == "attention-0"
            assert (await gw.error(answer))["type"] == "BadGatewayError"

    run(work())


def test_death_inside_another_body_aborts_the_connection() -> None:
    async def work() -> None:
        async with rig(FakeInstance(die="middle")) as gw:
            with pytest.raises(aiohttp.ClientError):
                async with gw.client.get(f"{gw.url}/v1/audio/speech") as answer:
                    await answer.read()

    run(work())


def test_json_beyond_the_memory_limit_streams() -> None:
    async def work() -> None:
        tight = replace(QUICK, max_json_bytes=4)
        async with (
            rig(FakeInstance(), settings=tight) as gw,
            gw.client.get(f"{gw.url}/v1/partial") as answer,
        ):
            assert await answer.json() == {"some": 1}

    run(work())


def test_body_limit() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(QUICK, max_body_bytes=1000)) as gw:

            async def chunks() -> object:
                for _ in range(11):
                    yield b"x" * 100

            for data in (b"x" * 1001, chunks()):  # with Content-Length, and chunked
                async with gw.client.post(f"{gw.url}/v1/completions", data=data) as answer:
                    assert answer.status == 413
                    assert "limit of 1000 bytes" in (await gw.error(answer))["message"]
            assert not instance.seen
            async with gw.client.post(f"{gw.url}/v1/completions", data=b"x" * 1000) as answer:
                assert (await answer.json())["size"] == 1000

    run(work())


def test_a_large_body_passes() -> None:
    async def work() -> None:
        async with rig(FakeInstance()) as gw:
            big = bytes(3 * 2**20)
            async with gw.client.post(f"{gw.url}/v1/completions", data=io.BytesIO(big)) as answer:
                assert (await answer.json())["size"] == len(big)

    run(work())


def test_no_instance_is_a_503_that_says_why() -> None:
    async def work() -> None:
        # Port 9 refuses connections; the gateway must not try it.
        starting = Upstream("attention-0", "http://127.0.0.1:9", state="starting")
        async with rig(members=(starting,)) as gw:
            headers = {"X-Request-Id": "abc"}
            async with gw.client.post(f"{gw.url}/v1/completions", headers=headers) as answer:
                assert answer.status == 503
                assert answer.headers["Retry-After"] == "5"
                assert answer.headers["X-Request-Id"] == "abc"
                error = await gw.error(answer)
                assert error["message"] == (
                    "no attention instance is ready: attention-0 is starting"
                )

    run(work())


def test_draining_instance_finishes_but_gets_nothing_new() -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0"), FakeInstance("attention-1")
        async with rig(first, second) as gw, gw.client.post(f"{gw.url}/v1/stream") as answer:
            assert await answer.content.readany()
            gw.members[0] = first.upstream(state="draining")
            gw.members[1] = replace(gw.members[1], state="ready")
            async with gw.client.get(f"{gw.url}/v1/models") as other:
                assert other.headers["x-afd-instance"] == "attention-1"
            del gw.members[0]  # the member may even leave
            await asyncio.sleep(0.15)
            first.go_on.set()
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")

    run(work())


def test_a_new_generation_needs_a_health_check_first() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=replace(QUICK, waiting=0)) as gw:
            instance.health = 503
            gw.members[0] = instance.upstream(generation=2)
            async with gw.client.get(f"{gw.url}/v1/models") as answer:
                assert answer.status == 503
                assert "has not replied yet" in (await gw.error(answer))["message"]
            instance.health = 200
            await gw.until("attention-0", Condition.HEALTHY)

    run(work())


def test_requests_go_to_the_least_busy_instance() -> None:
    async def work() -> None:
        instances = [FakeInstance(f"attention-{i}") for i in range(3)]
        async with rig(*instances) as gw:
            waiting = [asyncio.create_task(gw.client.get(f"{gw.url}/v1/wait")) for _ in range(9)]
            while sum(len(instance.seen) for instance in instances) < 9:
                await asyncio.sleep(0.01)
            assert [len(instance.seen) for instance in instances] == [3, 3, 3]
            for instance in instances:
                instance.go_on.set()
            for answer in await asyncio.gather(*waiting):
                assert answer.status == 200
                answer.release()

    run(work())


def test_requests_of_a_silent_instance_end_with_an_error() -> None:
    """A host without power resets no connections; the gateway notices only the silence."""

    async def work() -> None:
        instance = FakeInstance()
        strict = replace(QUICK, probe_timeout_s=0.1, abandon_after_s=0.3)
        async with (
            rig(instance, settings=strict) as gw,
            gw.client.post(f"{gw.url}/v1/stream") as answer,
        ):
            assert await answer.content.readany()
            real = instance._answer

            async def mute(_: object) -> object:
                await asyncio.sleep(60)

            assert instance._runner is not None and instance._runner.server is not None
            instance._runner.server.request_handler = mute
            text = await asyncio.wait_for(answer.read(), 3.0)
            assert b"no answer for 0.3 s" in text
            instance._runner.server.request_handler = real

    run(work())


@pytest.mark.parametrize("member", [True, False])
def test_streams_of_an_instance_that_closed_its_listener_end_with_one_error(member: bool) -> None:
    """vLLM on SIGTERM: engine and listener are closed, open connections neither end nor go on."""

    async def work() -> None:
        instance = FakeInstance()
        limit_s = 0.5 if member else 60.0
        strict = replace(QUICK, abandon_after_s=limit_s)
        async with (
            rig(instance, settings=strict) as gw,
            gw.client.post(f"{gw.url}/v1/stream") as answer,
        ):
            assert await answer.content.readany() == b'data: {"n": 0}\n\n'
            instance.close_listener()
            if not member:
                gw.members.clear()
            text = await asyncio.wait_for(answer.read(), 3.0)
            reason = b"no answer for 0.5 s" if member else b"it has left the deployment"
            assert text.count(b"data: ") == 1 and text.endswith(b"\n\n") and reason in text
            await asyncio.wait_for(instance.aborted.wait(), 3.0)

    run(work())


def test_a_request_without_a_first_byte_leaves_an_instance_that_closed_its_listener() -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0"), FakeInstance("attention-1")
        async with rig(first, second) as gw:
            waiting = asyncio.ensure_future(gw.client.get(f"{gw.url}/v1/wait"))
            await first.arrived.wait()
            second.go_on.set()
            first.close_listener()
            gw.members.remove(first.upstream())
            async with await asyncio.wait_for(waiting, 3.0) as answer:
                assert answer.status == 200 and (await answer.json())["me"] == "attention-1"

    run(work())


def test_paths_outside_the_api_are_refused_with_an_openai_error() -> None:
    async def work() -> None:
        async with rig(FakeInstance()) as gw:
            async with gw.client.get(f"{gw.url}/nope") as answer:
                assert answer.status == 404
                assert "/v1/*" in (await gw.error(answer))["message"]
            async with gw.client.post(f"{gw.url}/health") as answer:
                assert answer.status == 405
                assert answer.headers["Allow"] == "GET,HEAD"
                await gw.error(answer)
            headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
            async with gw.client.get(f"{gw.url}/v1/realtime", headers=headers) as answer:
                assert answer.status == 501
                await gw.error(answer)

    run(work())
