"""Handles attention instances that are late, gone, or send invalid messages."""

import logging
from collections.abc import Iterable

from afd.metrics.role import RoleMetrics
from afd.schedule import Position
from afd_comm import Status
from ffn_worker.pool.peers import Peer, PeerTable

logger = logging.getLogger("afd.ffn")

_CAUSES = {Status.DEADLINE: "missed its deadline", Status.PEER_GONE: "is gone"}


def _cause(status: Status) -> str:
    return _CAUSES.get(status, f"failed with {status.name}")


class LatePeers:
    """Counts and logs such instances, and drops those whose session cannot go on."""

    def __init__(self, table: PeerTable, metrics: RoleMetrics) -> None:
        self._table = table
        self._metrics = metrics

    def leave_out(self, peer: Peer, status: Status, position: Position) -> None:
        """The call runs without a peer whose request did not come. Its session goes on."""
        logger.warning(
            "%s %s (layer %d, micro-batch %d); continuing without it",
            peer.id,
            _cause(status),
            position.layer,
            position.micro_batch,
        )
        self._metrics.late_peers += 1

    def drop_failed(self, failed: Iterable[tuple[Peer, Status]]) -> None:
        """Drops peers that did not keep up in a step on streams: their streams and ours disagree
        about the doorbells from here on."""
        for peer, status in failed:
            logger.error("%s %s in a step; dropped until it restarts", peer.id, _cause(status))
            self._metrics.late_peers += 1
            self._table.drop(peer)

    def drop_invalid(self, peer: Peer, problem: str) -> None:
        """Drops a peer that sent an invalid message."""
        logger.error("%s sent %s; dropped until it restarts", peer.id, problem)
        self._table.drop(peer)
