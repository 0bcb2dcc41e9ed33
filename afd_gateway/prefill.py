"""Prefill/decode disaggregation: a prefill instance computes the prompt of a request first.

The request goes to a prefill instance with one token to generate. vLLM's answer says how to fetch
the KV cache of the prompt (``kv_transfer_params``). The attention instance that generates gets the
request with these. Both are vLLM's words, as in its NixlConnector.
"""

from __future__ import annotations

import json
import logging
import uuid
from typing import Any

from aiohttp import hdrs, web

from afd_gateway.attempt import Chunks, UpstreamLost, send
from afd_gateway.errors import GatewayError
from afd_gateway.pool import Pool
from afd_gateway.replay import CHAT, MAX_BODY_BYTES, TEXT
from afd_gateway.settings import GatewaySettings
from afd_gateway.telemetry import Telemetry

log = logging.getLogger("afd.gateway")

TRANSFER = "kv_transfer_params"
_NAME = b'"' + TRANSFER.encode() + b'"'
_ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_OF_ANSWER = frozenset(
    {"stream", "stream_options", "min_tokens", "logprobs", "top_logprobs", "return_token_ids"}
)
"""Fields that say what the client gets, and do not change the prompt."""
_MAX_ANSWER = 2**20  # bytes of a prefill instance's answer


def check_client(body: bytes) -> None:
    """Raises GatewayError 400 if a client names a KV cache itself.

    An attention instance would connect to any address in it. vLLM reads bodies as this does.
    """
    if TRANSFER.encode() not in body and b"\\u" not in body and _is_utf8(body):
        return
    try:
        fields = json.loads(body)
    except RecursionError:
        raise GatewayError(400, "the request body is nested too deeply") from None
    except ValueError:
        return  # vLLM refuses it
    if not isinstance(fields, dict):
        return
    xargs = fields.get("vllm_xargs")
    if TRANSFER in fields or (isinstance(xargs, dict) and TRANSFER in xargs):
        raise GatewayError(400, f"{TRANSFER} is set by the gateway; remove it")


def prompt_body(path: str, body: bytes) -> bytes | None:
    """Returns the body that makes a prefill instance compute the prompt of a request.

    None: the attention instance has to do it. Its answer needs the prompt's log-probabilities, or
    several requests of vLLM would fetch one KV cache, which is freed after the first.
    """
    fields = _fields(body) if path in (CHAT, TEXT) and _is_utf8(body) else None
    if not fields or any(fields.get(key) for key in ("echo", "use_beam_search")):
        return None
    if fields.get("prompt_logprobs") is not None or fields.get("prompt_embeds") is not None:
        return None
    if any(fields.get(key, 1) not in (1, None) for key in ("n", "best_of")):
        return None
    prompt = fields.get("prompt")
    if path == TEXT and not isinstance(prompt, str) and not _is_tokens(prompt):
        return None
    asked = {key: value for key, value in fields.items() if key not in _OF_ANSWER}
    asked |= {"max_tokens": 1, TRANSFER: {**_ASK, "transfer_id": uuid.uuid4().hex}}
    if path == CHAT:
        asked["max_completion_tokens"] = 1
    return json.dumps(asked, ensure_ascii=False, separators=(",", ":")).encode()


def _is_tokens(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(t) is int for t in prompt)


def with_transfer(body: bytes, params: dict[str, Any]) -> bytes:
    """Returns a request's body with what says how to fetch the KV cache of its prompt."""
    at = body.index(b"{") + 1
    told = json.dumps(params, separators=(",", ":")).encode()
    return body[:at] + _NAME + b":" + told + b"," + body[at:]


def _is_utf8(body: bytes) -> bool:
    return json.detect_encoding(body) == "utf-8"


def _fields(body: bytes) -> dict[str, Any] | None:
    if len(body) > MAX_BODY_BYTES:
        return None
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


class Prefiller:
    """Has prompts computed at prefill instances. own: see :func:`afd_gateway.answer.ask`."""

    def __init__(
        self,
        settings: GatewaySettings,
        pool: Pool,
        telemetry: Telemetry,
        *,
        own: bool,
    ) -> None:
        self._settings = settings
        self._pool = pool
        self._telemetry = telemetry
        self._own = own

    async def prepare(self, request: web.Request, body: bytes) -> bytes:
        """Returns the body for the attention instance: with the way to the KV cache, or as it is.

        If a prefill instance fails, the next one is asked; without any, the attention instance
        computes the prompt. If the client goes away, the prefill instance ends the request.
        """
        asked = None
        if request.method == "POST" and hdrs.CONTENT_ENCODING not in request.headers:
            asked = prompt_body(request.path, body)
        if asked is None:
            return body
        tried: set[tuple[str, int, str]] = set()
        while (lease := self._pool.acquire_prefill(tried, body)) is not None:
            tried.add(lease.upstream.key)
            try:
                with lease:
                    answer = await send(self._settings, request, asked, lease, own=self._own)
                    try:
                        status = (await answer.head()).status
                        text = await _read(Chunks(answer, lease))
                    finally:
                        answer.close()
            except UpstreamLost as lost:
                self._telemetry.prefill("failed")
                self._pool.mark_failed(lease.upstream, lost.reason)
                continue
            params = (_fields(text) or {}).get(TRANSFER) if status == 200 else None
            if isinstance(params, dict):
                self._telemetry.prefill("moved")
                return with_transfer(body, params)
            if status < 500:  # the attention instance tells the client why
                break
            self._telemetry.prefill("failed")
            self._pool.mark_failed(lease.upstream, f"it answered {status}")
        self._telemetry.prefill("local")
        return body


async def _read(chunks: Chunks) -> bytes:
    """Raises UpstreamLost."""
    parts, size = [], 0
    while size <= _MAX_ANSWER and (part := await chunks.next()):
        parts.append(part)
        size += len(part)
    return b"".join(parts)
