"""One gateway process over given upstreams, without a control plane.

Arguments: the descriptor of a listening socket and the upstreams' URLs. Prints "ready" and serves
until it is killed. It is run as a file, with the checkout whose gateway is wanted on PYTHONPATH, so
it imports nothing else of ours.
"""

from __future__ import annotations

import asyncio
import socket
import sys

from afd_gateway.descriptors import raise_descriptor_limit
from afd_gateway.server import start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream

try:
    from afd_gateway.loop import run
except ImportError:  # a checkout from before that module
    run = asyncio.run


async def serve(descriptor: int, urls: list[str]) -> None:
    upstreams = tuple(Upstream(f"attention-{i}", url, "", 1) for i, url in enumerate(urls))
    settings = GatewaySettings(attention_instances=len(urls), ffn_instances=0)
    listener = socket.socket(fileno=descriptor)
    listener.setblocking(False)
    server = await start_gateway(settings, lambda: upstreams, listener)
    while not any(view.eligible for view in server.gateway.pool.views()):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    raise_descriptor_limit()
    run(serve(int(sys.argv[1]), sys.argv[2:]))
