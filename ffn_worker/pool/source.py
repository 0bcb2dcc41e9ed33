"""Where the calls of a rank come from: it leads, or it follows orders."""

from collections.abc import Iterator
from typing import Protocol

from afd.config.resolve import Resolved
from ffn_worker.pool.arrivals import Arrivals, OnPause
from ffn_worker.pool.calls import Call, Settled
from ffn_worker.pool.follower import Follower, Head
from ffn_worker.pool.late_peers import LatePeers
from ffn_worker.pool.leader import Leader
from ffn_worker.pool.links import PoolLinks
from ffn_worker.pool.peers import PeerTable
from ffn_worker.slots import RankSlots


class CallSource(Protocol):
    """The leader, a head or a follower."""

    def calls(self) -> Iterator[Call | None]:
        """Yields calls forever, each once its requests are here; None if nothing came for a
        while."""


def make_source(
    resolved: Resolved,
    links: PoolLinks,
    slots: RankSlots,
    table: PeerTable,
    late: LatePeers,
    on_pause: OnPause,
    settled: Settled,
) -> CallSource:
    """Returns the source of calls for this rank's place in the pool."""
    arrivals = Arrivals(resolved, slots, table, late)
    inbox = links.inbox
    if inbox is None:
        return Leader(resolved, table, arrivals, late, on_pause, settled)
    if links.place.rank:
        return Follower(resolved, arrivals, inbox, on_pause)
    instance = links.place.instance
    return Head(resolved, table, arrivals, inbox, late, on_pause, settled, instance)
