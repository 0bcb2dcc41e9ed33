"""Keeps an FFN rank in line with the control plane while it serves."""

from ffn_worker.experts.moves import ExpertMoves
from ffn_worker.pool.peers import PeerTable
from ffn_worker.rank import FfnRank


class Membership:
    """Follows changes of the membership and of expert placement, between two expert calls."""

    def __init__(self, rank: FfnRank, table: PeerTable, moves: ExpertMoves) -> None:
        self._rank = rank
        self._table = table
        self._moves = moves

    def follow(self) -> None:
        """Raises PeerLost when a rank of this instance is gone."""
        control, table = self._rank.control, self._table
        self._rank.pool.reconcile()
        table.reconcile(control.members, control.generation)
        self._rank.metrics.peers_up = len(table.peers)
        self._moves.follow(control.members)
