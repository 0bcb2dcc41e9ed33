"""When the links to other processes are looked at again: after a change, or to retry."""

import logging
import math
import time

logger = logging.getLogger("afd.ffn")

RETRY_S = 0.02
"""Pause before members are tried again. A try takes time from the step of those that are there."""


class MembershipWatch:
    """Knows which membership has been acted on and which members could not be reached.

    Each reason is logged once per member.
    """

    def __init__(self) -> None:
        self._seen = (-1, -1)
        self._retry_at = math.inf
        self._said: dict[str, str] = {}

    def has_news(self, version: int, generation: int) -> bool:
        """Whether the links must be looked at now.

        version: of the membership. generation: our own.
        """
        now = (version, generation)
        if now == self._seen and (self._retry_at == math.inf or time.monotonic() < self._retry_at):
            return False
        self._seen, self._retry_at = now, math.inf
        return True

    def reached(self, member_id: str) -> None:
        self._said.pop(member_id, None)

    def failed(self, member_id: str, reason: str) -> None:
        """The member may have died since: the next change drops it, or it is tried again."""
        if self._said.get(member_id) != reason:
            self._said[member_id] = reason
            logger.warning("cannot reach %s: %s; trying again", member_id, reason)
        self._retry_at = time.monotonic() + RETRY_S
