"""A fake attention instance that streams tokens as vLLM 0.26 does, and resumes requests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from aiohttp import web
from gateway_fakes import FakeInstance

from afd_gateway.replay import CHAT, RESUME, TEXT

DEAD = {"error": {"message": "EngineCore", "type": "InternalServerError", "code": 500}}
REFUSED = {"error": {"message": "bad", "type": "BadRequestError", "code": 400}}


def word(choice: int, position: int, salt: int = 0) -> tuple[int, str]:
    """Returns a token: id and text. Determined by its place, and by ``salt`` if that is not 0."""
    token = (choice * 1000 + position) * 7 + salt
    return token, f' w{token},"token_ids":[1]'  # the text looks like what the gateway removes


@dataclass(eq=False)
class TokenInstance(FakeInstance):
    """Streams ``max_tokens`` tokens of ``n`` choices.

    die_after: how many tokens it streams before it fails. how: "reset", "event" (the engine died),
    "abort" (the engine was stopped), "end" (no last event), "refuse" (an error of the request), or
    "hang". resumes: whether it knows RESUME. salt: makes its tokens different. merged: tokens per
    event. status: of every answer, if not 200. ill_after: its /health fails after it has failed.
    """

    die_after: int = 10**9
    how: str = "reset"
    resumes: bool = True
    salt: int = 0
    merged: int = 1
    status: int = 200
    ill_after: bool = False
    requests: list[dict] = field(default_factory=list)

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.path not in (CHAT, TEXT):
            return await super()._answer(request)
        self.seen.append(request)
        self.arrived.set()
        fields = json.loads(await request.content.read())
        self.requests.append(fields)
        if self.status != 200:
            return web.json_response(DEAD, status=self.status)
        if not fields.get("stream"):
            if self.die_after < fields["max_tokens"]:
                return self._break(request)
            return web.json_response({"me": self.id})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        try:
            async for event in self._events(fields):
                await response.write(event)
        except ConnectionError:
            if self.how == "hang":
                await asyncio.sleep(60)
            if self.how not in ("end", "refuse"):
                return self._break(request)
        return response

    async def _events(self, fields: dict) -> AsyncIterator[bytes]:
        chat = "messages" in fields
        n, length = fields.get("n", 1), fields["max_tokens"]
        told = fields.get("vllm_xargs", {}).get(RESUME) if self.resumes else None
        given = json.loads(told)["choices"] if told else {}
        made, used = 0, 0
        if chat:
            for choice in range(n):
                delta = {"role": "assistant", "content": ""}
                yield self._event(fields, {"index": choice, "delta": delta, "finish_reason": None})
        for choice in range(n):
            tokens, finished = given.get(str(choice), ([], False))
            ready = [(token, self._text_of(token)) for token in tokens]
            if ready:
                yield self._event(fields, self._choice(fields, choice, ready, None))
            used += len(ready)
            if finished:
                continue
            rest = list(range(len(ready), length))
            while rest:
                group, rest = rest[: self.merged], rest[self.merged :]
                if made >= self.die_after:
                    async for event in self._failure(fields, choice):
                        yield event
                made += len(group)
                used += len(group)
                words = [word(choice, position, self.salt) for position in group]
                end = None if rest else "length"
                yield self._event(fields, self._choice(fields, choice, words, end))
                await asyncio.sleep(0.001)
        if fields.get("stream_options", {}).get("include_usage"):
            yield self._event(fields, None, usage={"completion_tokens": used})
        yield b"data: [DONE]\n\n"

    async def _failure(self, fields: dict, choice: int) -> AsyncIterator[bytes]:
        if self.ill_after:
            self.health = 503
        if self.how == "abort":
            yield self._event(fields, self._choice(fields, choice, [], "abort"))
            yield b"data: [DONE]\n\n"
        elif self.how in ("event", "refuse"):
            body = DEAD if self.how == "event" else REFUSED
            yield b"data: " + json.dumps(body).encode() + b"\n\ndata: [DONE]\n\n"
        raise ConnectionError

    def _text_of(self, token: int) -> str:
        return f' w{token},"token_ids":[1]'

    def _choice(
        self, fields: dict, choice: int, words: list[tuple[int, str]], end: str | None
    ) -> dict:
        text = "".join(text for _, text in words)
        said = {"delta": {"content": text}} if "messages" in fields else {"text": text}
        ids = [token for token, _ in words] if fields.get("return_token_ids") else None
        logprobs = None
        if fields.get("logprobs"):
            logprobs = {"tokens": [t for _, t in words], "token_logprobs": [-1.0] * len(words)}
        return {
            "index": choice,
            **said,
            "logprobs": logprobs,
            "finish_reason": end,
            "token_ids": ids,
        }

    def _event(self, fields: dict, choice: dict | None, **more: object) -> bytes:
        body = {
            "id": f"cmpl-{self.id}-{self.port}",
            "created": self.port,
            "choices": [] if choice is None else [choice],
            **more,
        }
        return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


def events_of(text: bytes) -> Iterator[dict]:
    """Yields the JSON of each event of a complete stream."""
    events = [event for event in text.split(b"\n\n") if event]
    assert events[-1] == b"data: [DONE]"
    for event in events[:-1]:
        yield json.loads(event.removeprefix(b"data: "))
