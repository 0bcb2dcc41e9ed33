"""Listening, /health, /metrics and draining."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import aiohttp
import pytest
from gateway_fakes import QUICK, FakeInstance, rig, run
from prometheus_client.parser import text_string_to_metric_families

from afd.errors import ConfigError
from afd.metrics.role import RoleMetrics, Stage
from afd.metrics.server import serve_metrics
from afd_gateway.listener import bind_listener
from afd_gateway.telemetry import path_template
from afd_gateway.upstreams import Condition, Upstream

FFN = Upstream("ffn-0")


def test_port_taken_is_one_clear_error() -> None:
    listener = bind_listener("127.0.0.1", 0)
    with listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            bind_listener("127.0.0.1", port)
    assert str(caught.value) == (
        f"gateway: port {port} on 127.0.0.1 is in use; choose another with gateway.port or stop"
        " the process that holds it"
    )


def test_an_address_of_another_machine_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is not an address of this machine"):
        bind_listener("192.0.2.1", 0)  # TEST-NET-1 is never assigned
    with pytest.raises(ConfigError, match=r"set gateway\.host"):
        bind_listener("not a host", 0)


def test_health_lists_each_member() -> None:
    async def work() -> None:
        instance = FakeInstance()
        both = replace(QUICK, attention_instances=2)
        async with rig(instance, settings=both, members=(replace(FFN, state="starting"),)) as gw:
            async with gw.client.get(f"{gw.url}/health") as answer:
                assert answer.status == 503
                told = await answer.json()
            assert told["status"] == "unavailable"
            assert told["reason"] == "not every FFN instance is ready: ffn-0 is starting"
            assert told["members"] == [
                {"id": "attention-0", "state": "ready", "health": "healthy", "generation": 1},
                {"id": "attention-1", "state": "absent", "health": None, "generation": None},
                {"id": "ffn-0", "state": "starting", "health": None, "generation": 0},
            ]
            gw.members[1] = FFN
            # One ready attention instance is enough.
            async with gw.client.get(f"{gw.url}/health") as answer:
                assert answer.status == 200
                assert (await answer.json())["status"] == "ok"
            await instance.stop()
            await gw.until("attention-0", Condition.UNHEALTHY)
            async with gw.client.get(f"{gw.url}/health") as answer:
                assert answer.status == 503
                assert "attention-0 is unhealthy" in (await answer.json())["reason"]

    run(work())


def samples(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(labels.items())


def test_metrics_of_the_whole_deployment_on_one_page() -> None:
    async def work() -> None:
        role = RoleMetrics("ffn", slots=3)
        role.stage(Stage.FFN).observe(0.01)
        worker = await asyncio.to_thread(serve_metrics, role)
        first, second = FakeInstance("attention-0"), FakeInstance("attention-1")
        try:
            members = (replace(FFN, metrics_url=worker.url), Upstream("ffn-1"))
            two = replace(QUICK, attention_instances=3, ffn_instances=2)
            async with rig(first, second, settings=two, members=members) as gw:
                gw.members[1] = replace(gw.members[1], metrics_url="http://127.0.0.1:9/metrics")
                async with gw.client.get(f"{gw.url}/v1/models") as answer:
                    assert answer.status == 200
                async with gw.client.get(f"{gw.url}/metrics") as answer:
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                    text = await answer.text()
        finally:
            worker.close()
        got = samples(text)
        assert got[key("vllm:num_requests_running", instance="attention-0")] == 1
        assert got[key("vllm:num_requests_running", instance="attention-1")] == 1
        assert got[key("afd_slots", instance="ffn-0")] == 3
        assert got[key("afd_stage_seconds_count", instance="ffn-0", stage="ffn")] == 1
        up = {name: got[key("afd_peer_up", instance=name)] for name in two.expected_ids()}
        assert up == {
            "attention-0": 1,
            "attention-1": 0,  # no page of its worker, only of its API server
            "attention-2": 0,  # never joined
            "ffn-0": 1,
            "ffn-1": 0,  # has no page
        }
        assert got[key("afd_gateway_upstream_up", instance="attention-0", gateway="gateway-0")] == 1
        assert (
            got[key("afd_gateway_inflight_requests", instance="attention-0", gateway="gateway-0")]
            == 0
        )
        ask = {"instance": "gateway-0", "method": "GET", "path_template": "/v1/models"}
        assert got[key("afd_gateway_requests_total", code="200", **ask)] == 1
        assert text.count("# TYPE vllm:num_requests_running ") == 1

    run(work())


def test_a_slow_member_costs_its_deadline_only() -> None:
    async def work() -> None:
        slow, quick = FakeInstance("attention-0", hold_metrics_s=30.0), FakeInstance("attention-1")
        async with rig(slow, quick) as gw:
            began = time.monotonic()
            async with gw.client.get(f"{gw.url}/metrics") as answer:
                got = samples(await answer.text())
            assert time.monotonic() - began < 2.0
            assert got[key("afd_peer_up", instance="attention-0")] == 0
            assert got[key("afd_peer_up", instance="attention-1")] == 1

    run(work())


def test_path_labels_are_bounded() -> None:
    assert path_template("/v1/chat/completions") == "/v1/chat/completions"
    assert path_template("/v1/models/a/b") == "/v1/models/{model}"
    assert path_template("/v1/responses/resp_1/cancel") == "/v1/responses/{id}"
    assert {path_template(f"/v1/{i}") for i in range(100)} == {"other"}


def test_draining_finishes_running_requests_and_takes_no_new_ones() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance, members=(FFN,)) as gw:
            async with gw.client.post(f"{gw.url}/v1/stream") as answer:
                assert await answer.content.readany()
                # A second connection, opened before draining.
                host, port = gw.url.removeprefix("http://").split(":")
                reader, writer = await asyncio.open_connection(host, int(port))
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                assert b"200" in await reader.readline()
                stopping = asyncio.create_task(gw.server.stop(5.0))
                await asyncio.sleep(0.05)
                with pytest.raises(aiohttp.ClientConnectorError):
                    await gw.client.get(f"{gw.url}/v1/models")
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
                rest = await reader.read()  # ends because the gateway closes it
                assert b"503 Service Unavailable" in rest
                assert b"the gateway is shutting down" in rest
                writer.close()
                assert not stopping.done()
                instance.go_on.set()
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            assert await stopping is True

    run(work())


@pytest.mark.parametrize("path", ["/v1/stream", "/v1/wait"])
def test_requests_left_at_the_deadline_get_an_error(path: str) -> None:
    async def work() -> None:
        first, second = FakeInstance("attention-0"), FakeInstance("attention-1")
        async with rig(first, second) as gw:
            asking = asyncio.create_task(gw.client.post(gw.url + path))
            await first.arrived.wait()
            began = time.monotonic()
            stopping = asyncio.create_task(gw.server.stop(0.2))
            async with await asking as answer:
                text = await answer.read()
            assert b"the gateway is shutting down" in text
            assert answer.status == (200 if path == "/v1/stream" else 503)
            assert await stopping is False
            assert time.monotonic() - began < 2.0
            assert not second.seen  # no retry while draining
            await asyncio.wait_for(first.aborted.wait(), 1.0)

    run(work())


def test_hurry_ends_the_drain_at_once() -> None:
    async def work() -> None:
        instance = FakeInstance()
        async with rig(instance) as gw:
            asking = asyncio.create_task(gw.client.post(f"{gw.url}/v1/wait"))
            await instance.arrived.wait()
            hurry = asyncio.Event()
            stopping = asyncio.create_task(gw.server.stop(60.0, hurry))
            await asyncio.sleep(0.05)
            hurry.set()
            assert await asyncio.wait_for(stopping, 3.0) is False
            (await asking).release()

    run(work())
