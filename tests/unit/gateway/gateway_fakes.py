"""Test doubles for the gateway: fake attention instances, and a real gateway over them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import TypeVar

import aiohttp
from aiohttp import web

from afd_gateway import loop
from afd_gateway.listener import bind_listener
from afd_gateway.server import GatewayServer, start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Condition, Upstream

T = TypeVar("T")
QUICK = GatewaySettings(port=0, probe_interval_s=0.05, scrape_deadline_s=0.3, drain_s=5.0)


def run(work: Coroutine[None, None, T], deadline_s: float = 9.0) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, deadline_s)

    return loop.run(bounded())  # the one of the role


@dataclass(eq=False)
class FakeInstance:
    """The API server of an attention instance.

    ``die``: when it aborts the connection: "before" the answer, after the "head", in the "middle"
    of the body, or never (""). ``aborted`` is set when the gateway cancels a request.
    """

    id: str = "attention-0"
    die: str = ""
    health: int = 200
    metrics: str = "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running 1\n"
    seen: list[web.BaseRequest] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    hold_metrics_s: float = 0.0
    hold_end_s: float = 0.0  # delay between a stream's last event and its end
    _runner: web.ServerRunner | None = None

    async def start(self) -> None:
        server = web.Server(self._answer, handler_cancellation=True, auto_decompress=False)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site.port

    def close_listener(self) -> None:
        """Refuses new connections; the open ones stay."""
        assert self._runner is not None
        for site in self._runner.sites:
            site._server.close()

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def upstream(self, generation: int = 1, state: str = "ready") -> Upstream:
        return Upstream(self.id, f"http://127.0.0.1:{self.port}", "", generation, state)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/health":
            return web.Response(status=self.health)
        if request.path == "/metrics":
            await asyncio.sleep(self.hold_metrics_s)
            return web.Response(text=self.metrics)
        self.seen.append(request)
        self.arrived.set()
        try:
            self.bodies.append(await request.content.read())
            if self.die == "before":
                return self._break(request)
            if request.path == "/v1/stream":
                return await self._stream(request)
            return await self._plain(request)
        except asyncio.CancelledError:
            self.aborted.set()
            raise

    async def _stream(self, request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "X-Request-Id": "r-1"}
        )
        await response.prepare(request)
        if self.die == "head":
            return self._break(request)
        await response.write(b'data: {"n": 0}\n\n')
        if self.die == "middle":
            await response.write(b'data: {"n": 1')
            await asyncio.sleep(0.05)
            return self._break(request)
        await self.go_on.wait()
        await response.write(b'data: {"n": 1}\n\n')
        await response.write(b"data: [DONE]\n\n")
        await asyncio.sleep(self.hold_end_s)
        return response

    async def _plain(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/wait":
            await self.go_on.wait()
        if request.path == "/v1/missing":
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.path in ("/v1/audio/speech", "/v1/partial"):
            kind = "audio/wav" if request.path == "/v1/audio/speech" else "application/json"
            response = web.StreamResponse(headers={"Content-Type": kind})
            await response.prepare(request)
            await response.write(b'{"some')
            await asyncio.sleep(0.05)
            if self.die == "middle":
                return self._break(request)
            await response.write(b'": 1}')
            return response
        body = {
            "me": self.id,
            "method": request.method,
            "target": request.raw_path,
            "headers": [[key, value] for key, value in request.headers.items()],
            "size": len(self.bodies[-1]),
        }
        return web.json_response(
            body,
            headers=[
                ("X-Request-Id", request.headers.get("X-Request-Id", "none")),
                ("Set-Cookie", "a=1"),
                ("Set-Cookie", "b=2"),
                ("Keep-Alive", "timeout=5"),
            ],
        )

    @staticmethod
    def _break(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


@dataclass
class Rig:
    """A running gateway and an HTTP client. members: the upstreams that the gateway sees."""

    server: GatewayServer
    client: aiohttp.ClientSession
    members: list[Upstream]

    @property
    def url(self) -> str:
        return self.server.url

    def condition(self, member_id: str) -> Condition | None:
        views = {view.upstream.id: view for view in self.server.gateway.pool.views()}
        return views[member_id].health.condition if member_id in views else None

    async def until(self, member_id: str, condition: Condition) -> None:
        while self.condition(member_id) is not condition:
            await asyncio.sleep(0.01)

    async def error(self, answer: aiohttp.ClientResponse) -> dict[str, object]:
        body = json.loads(await answer.read())
        assert set(body) == {"error"}
        assert set(body["error"]) == {"message", "type", "param", "code"}
        assert body["error"]["code"] == answer.status
        return body["error"]


@contextlib.asynccontextmanager
async def rig(
    *instances: FakeInstance,
    settings: GatewaySettings = QUICK,
    members: tuple[Upstream, ...] = (),
    wait: bool = True,
) -> AsyncIterator[Rig]:
    """Starts the instances and a gateway over them and ``members``; waits for healthy instances."""
    for instance in instances:
        await instance.start()
    everyone = [instance.upstream() for instance in instances] + list(members)
    listener = bind_listener(settings.host, settings.port)
    server = await start_gateway(settings, lambda: tuple(everyone), listener)
    try:
        async with aiohttp.ClientSession(auto_decompress=False) as client:
            made = Rig(server, client, everyone)
            for instance in instances if wait else ():
                await made.until(instance.id, Condition.HEALTHY)
            yield made
    finally:
        await server.stop(0.0)
        for instance in instances:
            await instance.stop()
