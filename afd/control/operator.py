"""What an operator does to a running deployment; the commands of ``afd status|depth|drain``."""

from __future__ import annotations

import time
import uuid

from afd.control import messages as m
from afd.control.channel import Channel
from afd.control.keys import CurveKeys
from afd.errors import ConfigError, DeadlineExceeded, HandshakeRefused

_RETRY_S = 0.05


def status(address: str, keys: CurveKeys | None = None, *, deadline_s: float = 5.0) -> m.Members:
    """The members, the runtime depth and whether the deployment drains."""
    return _ask(address, keys, m.Status(), deadline_s)


def set_depth(
    address: str, keys: CurveKeys | None = None, *, depth: int | None, deadline_s: float = 5.0
) -> m.Members:
    """Sets the number of micro-batches of every attention instance from its next step on; None
    goes back to the configured one. ConfigError if it is outside of 1..max_depth."""
    return _ask(address, keys, m.SetDepth(depth), deadline_s)


def drain(
    address: str, keys: CurveKeys | None = None, *, on: bool = True, deadline_s: float = 5.0
) -> m.Members:
    """Asks all members to finish what they have and take nothing new; ``on=False`` calls it off."""
    return _ask(address, keys, m.Drain(on), deadline_s)


def shutdown(address: str, keys: CurveKeys | None = None, *, deadline_s: float = 5.0) -> m.Members:
    """Tells all members to stop and ends the control plane; returns who was registered."""
    return _ask(address, keys, m.Shutdown(), deadline_s)


def _ask(
    address: str, keys: CurveKeys | None, question: m.FromOperator, deadline_s: float
) -> m.Members:
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
                if isinstance(message, m.Members):
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
