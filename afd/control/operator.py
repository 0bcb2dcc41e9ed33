"""Operator commands to a running deployment, as used by ``afd ctl``.

``keys`` are the operators'; None looks for a deployment of this user on this host that has its
control plane at the address (:mod:`afd.control.local_keys`).
"""

from __future__ import annotations

import time
import uuid
from typing import TypeVar

from afd.config.contract import Contract
from afd.control import messages as m
from afd.control.channel import Channel
from afd.control.keys import ClientKeys
from afd.control.local_keys import operator_keys
from afd.errors import ConfigError, DeadlineExceeded, HandshakeRefused

_RETRY_S = 0.05

_Answer = TypeVar("_Answer", m.Members, m.Agreement)


def status(address: str, keys: ClientKeys | None = None, *, deadline_s: float = 5.0) -> m.Members:
    """Returns the members, the runtime depth and whether the deployment drains."""
    return _ask(address, keys, m.Status(), m.Members, deadline_s)


def contract(
    address: str, keys: ClientKeys | None = None, *, deadline_s: float = 5.0
) -> Contract | None:
    """Returns the contract that all members share; None while there is no member."""
    return _ask(address, keys, m.AskContract(), m.Agreement, deadline_s).contract


def set_depth(
    address: str, keys: ClientKeys | None = None, *, depth: int | None, deadline_s: float = 5.0
) -> m.Members:
    """Sets the number of micro-batches of every attention instance from its next step on.

    None restores the configured depth; AUTO (afd/depth.py) chooses it from measured step times.
    Raises ConfigError if it is outside of 1..max_depth."""
    return _ask(address, keys, m.SetDepth(depth), m.Members, deadline_s)


def drain(
    address: str, keys: ClientKeys | None = None, *, on: bool = True, deadline_s: float = 5.0
) -> m.Members:
    """Running requests finish, gateways refuse new ones; ``on=False`` ends it."""
    return _ask(address, keys, m.Drain(on), m.Members, deadline_s)


def set_seat(
    address: str,
    keys: ClientKeys | None = None,
    *,
    member: str,
    wish: m.Wish,
    deadline_s: float = 5.0,
) -> m.Members:
    """Sets what is wanted of an instance (:class:`afd.control.messages.SetSeat`). The
    supervisor of its host follows within a second. ConfigError says why it cannot be met."""
    return _ask(address, keys, m.SetSeat(member, wish), m.Members, deadline_s)


def retire(address: str, keys: ClientKeys, *, member: str, deadline_s: float = 5.0) -> m.Members:
    """Lets a member finish its requests and get no new ones. keys: the member's own."""
    return _ask(address, keys, m.SetSeat(member, "drain", once=True), m.Members, deadline_s)


def move_experts(
    address: str,
    keys: ClientKeys | None = None,
    *,
    tables: tuple[tuple[int, ...], ...],
    deadline_s: float = 5.0,
) -> m.Members:
    """Starts to move experts, layer by layer, to the slots of ``tables``; ``moves_left`` of the
    snapshot shows the progress. ConfigError if they cannot be moved there, or not now."""
    return _ask(address, keys, m.MoveExperts(tables), m.Members, deadline_s)


def shutdown(address: str, keys: ClientKeys | None = None, *, deadline_s: float = 5.0) -> m.Members:
    """Tells all members to stop and ends the control plane; returns the last members."""
    return _ask(address, keys, m.Shutdown(), m.Members, deadline_s)


def _ask(
    address: str,
    keys: ClientKeys | None,
    question: m.FromOperator,
    answer: type[_Answer],
    deadline_s: float,
) -> _Answer:
    """Sends the request once per connection until a reply comes; all requests are idempotent."""
    channel = Channel(address, keys or operator_keys(address), uuid.uuid4().hex.encode("ascii"))
    end = time.monotonic() + deadline_s
    connected = asked = False
    try:
        while (left := end - time.monotonic()) > 0:
            received = channel.poll(min(left, _RETRY_S) if connected and not asked else left)
            if received.connected:
                connected, asked = True, False
            if connected and not asked:
                asked = channel.send(question)
            for message in received.messages:
                if isinstance(message, answer):
                    return message
                if isinstance(message, m.Refused):
                    raise ConfigError(message.reason)
            if channel.fault is not None and channel.fault_is_final:
                raise HandshakeRefused(f"control plane at {address}: {channel.fault}")
        cause = channel.fault or "is `afd control` running, and is the address reachable from here?"
        raise DeadlineExceeded(
            f"control plane at {address} did not answer within {deadline_s:g} s; {cause}"
        )
    finally:
        channel.close()
