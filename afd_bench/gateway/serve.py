"""One gateway process over given upstreams, without a control plane.

Arguments: descriptors of a listening socket and of shared counts, number of this process, number of
processes, descriptor of kept answers (-1 for none), and the upstreams' URLs. Prints
"ready" and serves until it is killed.

It is run as a file, with the checkout whose gateway is wanted on PYTHONPATH, so it imports nothing
else of ours.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace
from pathlib import Path

import afd_gateway
from afd_gateway.descriptors import raise_descriptor_limit
from afd_gateway.server import GatewayServer, start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Provider, Upstream

HAS_COUNTS = Path(afd_gateway.__file__).with_name("counts.py").exists()
"""False: a checkout from before several processes and the queue. An editable installation would
lend it the modules that it lacks."""


async def serve(
    port: int, counts: int, process: int, processes: int, answers: int, *urls: str
) -> None:
    upstreams = tuple(Upstream(f"attention-{i}", url, "", 1) for i, url in enumerate(urls))
    listener = socket.socket(fileno=port)
    listener.setblocking(False)
    settings = GatewaySettings(attention_instances=len(urls), ffn_instances=0)
    if answers >= 0:  # other checkouts may not know of it
        settings = replace(settings, answers=answers)
    if HAS_COUNTS:
        server = await _with_counts(
            settings, lambda: upstreams, listener, counts, process, processes
        )
    else:
        server = await start_gateway(settings, lambda: upstreams, listener)
    while not any(view.eligible for view in server.gateway.pool.views()):
        await asyncio.sleep(0.05)
    print("ready", flush=True)
    await asyncio.Event().wait()


async def _with_counts(
    settings: GatewaySettings,
    provider: Provider,
    listener: socket.socket,
    descriptor: int,
    process: int,
    processes: int,
) -> GatewayServer:
    """As in a deployment: every request asks for its turn."""
    from afd_gateway.counts import Counts

    settings = replace(settings, max_running=4096, process=process, processes=processes)
    shared = Counts(descriptor, process, processes)
    return await start_gateway(settings, provider, listener, shared)


def main() -> None:
    raise_descriptor_limit()
    port, counts, process, processes, answers = map(int, sys.argv[1:6])
    work = serve(port, counts, process, processes, answers, *sys.argv[6:])
    if HAS_COUNTS:
        from afd_gateway.loop import run

        run(work)
    else:
        asyncio.run(work)


if __name__ == "__main__":
    main()
