"""Who may send which message to the control plane. Pure.

The CURVE handshake proves which key a sender holds. A key belongs to one member, or to operators.
"""

from __future__ import annotations

from collections.abc import Iterable

from afd.config.deployment import Deployment
from afd.control import messages as m
from afd.control.keys import CurveKeys
from afd.topology import key_owner, member_id

OPERATOR = "operator"

_SPARE = 8
"""Instances beyond the configured ones that get keys: their Hello is refused with the reason that
their number is out of range, instead of a failed handshake."""


def known_keys(keys: CurveKeys, members: Iterable[str]) -> dict[str, str]:
    """Returns who holds which public key (Z85): member ids and OPERATOR."""
    holders = {keys.member(member).client_public: member for member in members}
    return {**holders, keys.operator.client_public: OPERATOR}


def member_ids(deployment: Deployment) -> tuple[str, ...]:
    """Returns every id that a process of this deployment may register with."""
    attention, ffn = deployment.attention, deployment.ffn
    return (
        *(member_id("attention", i) for i in range(attention.capacity + _SPARE)),
        *(
            member_id("ffn", i, rank)
            for i in range(ffn.capacity + _SPARE)
            for rank in range(ffn.tp)
        ),
        *(member_id("gateway", i) for i in range(deployment.gateway.processes)),
    )


def denial(sender: str | None, message: m.ToServer, registered: str | None) -> str | None:
    """Returns why ``sender`` must not send this message, or None if it may.

    Args:
        sender: member id or OPERATOR, by the key of the connection; None: unknown.
        registered: id of the member that registered over this connection, if one has.
    """
    match message:
        case m.Hello():
            claimed = member_id(message.role, message.index, message.rank)
            if sender != key_owner(claimed):
                return (
                    f"{claimed} refused: its key is the one of {sender}; give every role its own"
                    " keys, or the same control.keys file"
                )
        case m.Heartbeat() | m.Bye():
            own = registered is None or sender == key_owner(registered)
            if sender is None or not own:
                return f"the connection of {registered} belongs to another key"
        case m.SetSeat(id=claimed, wish="drain", once=True) if sender == claimed:
            return None  # its process got SIGTERM
        case _:
            if sender != OPERATOR:
                return (
                    f"{sender} is a member and no operator; use the deployment's keys"
                    " (afd ctl --keys FILE)"
                )
    return None
