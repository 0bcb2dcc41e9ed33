"""Members as the control plane's registry keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from afd.config.contract import Contract
from afd.control.messages import Member


@dataclass
class Entry:
    """A member as the server sees it. peer: None while it is known from the snapshot of another
    member only and has not spoken to this run of the server."""

    member: Member
    peer: bytes | None
    contract: Contract | None
    heard: float  # seconds of the monotonic clock
    moves: int = 0  # number of the last expert move that it has made
    partial: bool = False  # known from a snapshot without addresses


def reference_of(
    entries: Iterable[Entry], expected: Contract | None
) -> tuple[str, Contract] | None:
    """Returns a holder of the contract that all members must equal, and the contract.

    All holders have equal contracts, so this is the first one's. When the last holder has left,
    members with another contract may join, unless the server itself knows the contract.

    Args:
        expected: the contract that the server itself knows.
    """
    if expected is not None:
        return "the control plane", expected
    holders = [
        (entry.member.generation, entry.member.id, entry.contract)
        for entry in entries
        if entry.contract is not None
    ]
    if not holders:
        return None
    _, holder, contract = min(holders, key=lambda h: h[0])
    return holder, contract
