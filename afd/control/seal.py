"""Seals: how a restarted control plane knows snapshots that an earlier run of it made. Pure.

A returning member brings the last snapshot that it got. Without a seal, any member could make up
other members, their addresses and generations, and the server would tell the deployment of them.
"""

from __future__ import annotations

import hashlib
import hmac

import msgspec

from afd.control.messages import Members, encode


class Seal:
    """Makes and checks seals: HMAC-SHA256 of the encoded snapshot, under a key of the server."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def put_on(self, snapshot: Members) -> Members:
        """Returns the snapshot with its seal."""
        return msgspec.structs.replace(snapshot, seal=self._of(snapshot))

    def is_on(self, snapshot: Members) -> bool:
        """Whether the snapshot has the right seal."""
        return hmac.compare_digest(self._of(snapshot), snapshot.seal)

    def _of(self, snapshot: Members) -> bytes:
        plain = msgspec.structs.replace(snapshot, seal=b"")
        return hmac.digest(self._key, encode(plain), hashlib.sha256)


def without_addresses(snapshot: Members) -> Members:
    """The snapshot without the addresses of Regions, which hold the tokens of their slots."""
    members = tuple(
        msgspec.structs.replace(member, addresses=(), order_addresses=())
        for member in snapshot.members
    )
    return msgspec.structs.replace(snapshot, members=members)
