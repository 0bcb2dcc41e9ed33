"""Counts the requests in the API server of an attention instance. Imports no vLLM.

vLLM loads it as an ASGI middleware (``--middleware``). `afd attention` reads the number before it
ends vLLM. vLLM's own counters do not go down when clients disconnect.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

MIDDLEWARE = "attention_worker.running_requests.RunningRequests"
PATH = "/afd/running"
"""Answers with the number of running requests, in decimal digits."""
ENGINE_DIED = 3
"""Exit status of an API server that ended because its engine had died."""

Message = MutableMapping[str, Any]  # as ASGI defines it
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class RunningRequests:
    """ASGI middleware. A request runs from its headers to the end of its response."""

    def __init__(self, app: App) -> None:
        self._app = app
        self.running = 0

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] == PATH:
            await _answer(send, str(self.running).encode("ascii"))
        elif scope["type"] == "http" and scope["method"] == "POST":
            self.running += 1
            try:
                await self._app(scope, receive, send)
            finally:
                self.running -= 1
        else:
            await self._app(scope, receive, send)


async def _answer(send: Send, body: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
