"""One gateway process over given upstreams, without a control plane.

Arguments: descriptors of a listening socket and of shared counts, number of this process, number of
processes, and the upstreams' URLs. Prints "ready" and serves until it is killed.

It is run as a file, with the checkout whose gateway is wanted on PYTHONPATH, so
it imports nothing else of ours.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace

from afd_gateway.descriptors import raise_descriptor_limit
from afd_gateway.server import start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream

try:
    from afd_gateway.counts import Counts
    from afd_gateway.loop import run
except ImportError:  # a checkout from before these modules
    Counts, run = None, asyncio.run


async def serve(port: int, counts: int, process: int, processes: int, urls: list[str]) -> None:
    upstreams = tuple(Upstream(f"attention-{i}", url, "", 1) for i, url in enumerate(urls))
    settings = GatewaySettings(attention_instances=len(urls), ffn_instances=0)
    listener = socket.socket(fileno=port)
    listener.setblocking(False)
    if Counts is None:
        server = await start_gateway(settings, lambda: upstreams, listener)
    else:  # as a deployment with its default limits
        settings = replace(settings, max_running=4096, process=process, processes=processes)
        shared = Counts(counts, process, processes)
        server = await start_gateway(settings, lambda: upstreams, listener, shared)
    while not any(view.eligible for view in server.gateway.pool.views()):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    raise_descriptor_limit()
    run(serve(*map(int, sys.argv[1:5]), sys.argv[5:]))
