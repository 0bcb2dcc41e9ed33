"""The gateway role: registers with the control plane, gets the instances from it, and serves.

The port is bound first. Until an instance is ready, requests get a 503 that names what is missing,
so clients do not see refused connections during a start.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Container
from dataclasses import replace

from afd.control.client import ControlClient
from afd.control.messages import Member, Members
from afd.control.seats import draining
from afd.errors import HandshakeRefused
from afd_gateway.counts import Counts
from afd_gateway.descriptors import raise_descriptor_limit
from afd_gateway.listener import bind_listener
from afd_gateway.loop import run
from afd_gateway.server import GatewayServer, start_gateway
from afd_gateway.settings import GatewaySettings
from afd_gateway.upstreams import Upstream

log = logging.getLogger("afd.gateway")

_SETTLE_S = 3.0
_LOOK_S = 0.02


def upstreams_of(
    members: Members, own_id: str = "", prefills: Container[str] = ()
) -> tuple[Upstream, ...]:
    """Returns the members but ``own_id``, and of an attention instance the rank that has its API.

    prefills: ids of those that compute prompts only.

    Those that are ready drain with the deployment, or if an operator wants no new requests there.
    """
    return tuple(
        Upstream(
            id=member.id,
            api_url=member.api_url if member.role == "attention" else "",
            metrics_url=member.metrics_url,
            generation=member.generation,
            state="draining"
            if member.state == "ready" and _drains(members, member)
            else member.state,
            task="prefill" if member.id in prefills else "generate",
        )
        for member in members.members
        if member.id != own_id and not (member.role == "attention" and member.rank)
    )


def _drains(members: Members, member: Member) -> bool:
    alone = member.role == "attention" and draining(members, member.id, member.generation)
    return members.draining or alone


class ControlProvider:
    """A Provider that converts each snapshot of the control client once.

    Colocated prefill instances are added: they do not register.
    """

    def __init__(self, client: ControlClient, settings: GatewaySettings) -> None:
        self._client = client
        self._own_id = settings.instance
        self._prefills = settings.prefill_ids
        self._colocated = tuple(
            Upstream(f"prefill-{index}", url, task="prefill")
            for index, url in enumerate(settings.prefill_urls)
        )
        self._seen: Members | None = None
        self._upstreams: tuple[Upstream, ...] = ()

    def __call__(self) -> tuple[Upstream, ...]:
        members = self._client.members
        if members is not self._seen:
            known = upstreams_of(members, self._own_id, self._prefills)
            self._upstreams = (*known, *self._colocated)
            self._seen = members
        return self._upstreams

    def wanted(self) -> tuple[str, ...]:
        """See :class:`GatewaySettings`."""
        seats = self._client.members.seats
        return tuple(seat.id for seat in seats if "." not in seat.id)


def run_gateway(
    settings: GatewaySettings,
    connect: Callable[[], ControlClient],
    *,
    join_deadline_s: float,
    on_listening: Callable[[str], None] | None = None,
    listener: socket.socket | None = None,
    counts: Counts | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT, drains, and returns exit code 0.

    A second signal ends the drain.

    Args:
        connect: makes the control client; called after the port is bound.
        on_listening: called with the URL.
        listener: from ``bind_listener``, if the caller has bound the port already.
        counts: shared with the other processes of the port.

    Raises:
        ConfigError: the port cannot be used.
        HandshakeRefused, DeadlineExceeded: the control plane refused the gateway or is silent.
    """
    raise_descriptor_limit()
    listener = listener or bind_listener(
        settings.host, settings.port, shared=settings.processes > 1
    )
    try:
        run(_run(settings, connect, listener, counts, join_deadline_s, on_listening))
    finally:
        listener.close()
    return 0


async def _run(
    settings: GatewaySettings,
    connect: Callable[[], ControlClient],
    listener: socket.socket,
    counts: Counts | None,
    join_deadline_s: float,
    on_listening: Callable[[str], None] | None,
) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())
    client = connect()
    try:
        provider = ControlProvider(client, settings)
        settings = replace(settings, wanted=provider.wanted)
        alone = counts is None
        server = await start_gateway(settings, provider, listener, counts, accept=alone)

        def changed() -> None:
            server.members_changed()
            if client.stopping or client.refused:  # the operator, or another gateway with this id
                stop.set()

        client.on_change(lambda _: _tell(loop, changed))
        opening = asyncio.create_task(_accept_soon(server, alone))
        joining = asyncio.create_task(_join(client, server, opening, join_deadline_s))
        stopping = asyncio.create_task(stop.wait())
        drain_s = 0.0
        try:
            if on_listening is not None:
                on_listening(server.url)
            await asyncio.wait({joining, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if joining.done():
                joining.result()  # raises if the control plane refused us
                await stop.wait()
                client.set_state("draining")
            drain_s = settings.drain_s
        finally:
            await server.stop(drain_s, hurry)
            joining.cancel()
            opening.cancel()
            stopping.cancel()
        if client.refused:
            raise HandshakeRefused(client.refused)
        client.leave()
    finally:
        client.close()


async def _accept_soon(server: GatewayServer, alone: bool) -> None:
    """Accepts once the instances are known; one process alone accepts from the start.

    A held port has connections that waited while this process was started again. They would be told
    that no instance is ready.
    """
    if alone:
        return
    loop = asyncio.get_running_loop()
    end = loop.time() + _SETTLE_S
    while not server.gateway.pool.settled and loop.time() < end:
        await asyncio.sleep(_LOOK_S)
    server.accept()


async def _join(
    client: ControlClient, server: GatewayServer, opening: asyncio.Task[None], deadline_s: float
) -> None:
    """Registers. Says that this process is ready once it accepts connections."""
    generation = await asyncio.to_thread(
        client.join,
        addresses=(),
        api_url=server.url,
        metrics_url=server.metrics_url,
        deadline_s=deadline_s,
    )
    await opening
    client.set_state("ready")
    log.info("gateway at %s, generation %d", server.url, generation)


def _tell(loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
    """Runs ``changed`` on the loop; called on the client's thread, ignored after the loop ended."""
    try:
        loop.call_soon_threadsafe(changed)
    except RuntimeError:
        log.debug("membership changed after the gateway ended")
