"""Requests that refer to a stored response go to the attention instance that has it.

vLLM keeps the responses of its Responses API in the memory of the API server that made them
(VLLM_ENABLE_RESPONSES_API_STORE=1). The gateway asks the instances, so that every gateway process
finds a response, also after a restart of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from afd_gateway.owner import ForeignListener
from afd_gateway.upstreams import View

Key = tuple[str, int, str]
_PATH = "/v1/responses"


class _Body(msgspec.Struct):
    previous_response_id: str | None = None


_decoder = msgspec.json.Decoder(_Body)


def response_id(request: web.Request, body: bytes) -> str | None:
    """Returns the id of the stored response that a request refers to, as in a URL; else None."""
    path = request.rel_url.raw_path
    if path.startswith(f"{_PATH}/"):
        return path.split("/")[3] or None
    if path != _PATH or request.method != "POST" or b"previous_response_id" not in body:
        return None
    try:
        previous = _decoder.decode(body).previous_response_id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return None if not previous else URL.build(path=previous).raw_path


async def others_than_holder(
    session: aiohttp.ClientSession,
    views: Iterable[View],
    wanted: str,
    headers: Mapping[str, str],
    deadline_s: float,
) -> set[Key]:
    """Returns the keys of the instances that do not have a response; none if no instance has it.

    headers: the client's, as they go upstream; an instance may check its key.
    """
    served = [view.upstream for view in views if view.eligible]
    if len(served) < 2:
        return set()
    timeout = aiohttp.ClientTimeout(total=deadline_s)
    kept = {name: value for name, value in headers.items() if name.lower() == "authorization"}

    async def has_it(api_url: str) -> bool:
        url = URL(f"{api_url.rstrip('/')}{_PATH}/{wanted}", encoded=True)
        try:
            async with session.get(url, timeout=timeout, headers=kept) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, ForeignListener, OSError, asyncio.TimeoutError):
            return False

    found = await asyncio.gather(*(has_it(upstream.api_url) for upstream in served))
    if not any(found):
        return set()
    return {upstream.key for upstream, has in zip(served, found, strict=True) if not has}
