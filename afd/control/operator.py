"""What an operator does to a running deployment; the commands of ``afd status|depth|drain``."""

from __future__ import annotations

import time
import uuid
from typing import TypeVar

from afd.control import messages as m
from afd.control.channel import Channel
from afd.control.contract import Contract
from afd.control.keys import CurveKeys
from afd.errors import ConfigError, DeadlineExceeded, HandshakeRefused

_RETRY_S = 0.05

_Answer = TypeVar("_Answer", m.Members, m.Agreement)


def status(address: str, keys: CurveKeys | None = None, *, deadline_s: float = 5.0) -> m.Members:
    """The members, the runtime depth and whether the deployment drains."""
    return _ask(address, keys, m.Status(), m.Members, deadline_s)


def contract(
    address: str, keys: CurveKeys | None = None, *, deadline_s: float = 5.0
) -> Contract | None:
    """What all members share; None while none is there."""
    return _ask(address, keys, m.AskContract(), m.Agreement, deadline_s).contract


def set_depth(
    address: str, keys: CurveKeys | None = None, *, depth: int | None, deadline_s: float = 5.0
) -> m.Members:
    """Sets the number of micro-batches of every attention instance from its next step on; None
    goes back to the configured one, AUTO (afd/depth.py) has measured step times choose. ConfigError
    if it is outside of 1..max_depth."""
    return _ask(address, keys, m.SetDepth(depth), m.Members, deadline_s)


def drain(
    address: str, keys: CurveKeys | None = None, *, on: bool = True, deadline_s: float = 5.0
) -> m.Members:
    """Asks all members to finish what they have and take nothing new; ``on=False`` calls it off."""
    return _ask(address, keys, m.Drain(on), m.Members, deadline_s)


def move_experts(
    address: str,
    keys: CurveKeys | None = None,
    *,
    tables: tuple[tuple[int, ...], ...],
    deadline_s: float = 5.0,
) -> m.Members:
    """Begins to move experts, one layer after the other, to the slots of ``tables``; the snapshot's
    ``moves_left`` says how far it is. ConfigError if they cannot be moved there, or not now."""
    return _ask(address, keys, m.MoveExperts(tables), m.Members, deadline_s)


def shutdown(address: str, keys: CurveKeys | None = None, *, deadline_s: float = 5.0) -> m.Members:
    """Tells all members to stop and ends the control plane; returns who was registered."""
    return _ask(address, keys, m.Shutdown(), m.Members, deadline_s)


def _ask(
    address: str,
    keys: CurveKeys | None,
    question: m.FromOperator,
    answer: type[_Answer],
    deadline_s: float,
) -> _Answer:
    """Asks once per connection until an answer comes: every question may be repeated."""
    channel = Channel(address, keys, uuid.uuid4().hex.encode("ascii"))
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
