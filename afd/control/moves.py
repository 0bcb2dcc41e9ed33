"""Experts that change their places while the deployment serves: the protocol as pure functions.

Layers move one after the other. First every FFN instance reads the layer's new experts into the
layer's other *bank*, and says so; then every attention instance counts on them from its next step
on, and says so; then nobody asks for the old ones any more. Ids on the wire tell which bank is
meant, so the instances need not switch at the same moment.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from afd.control.contract import Contract
from afd.control.messages import Members, Move
from afd.placement import Placement, Table, problem

Where = tuple[int, Table]
"""(bank, expert in every slot) of one layer."""


def settled(members: Members, start: Placement, layers: Sequence[int]) -> dict[int, Where]:
    """Where every layer's experts are, but for the move that is under way."""
    places: dict[int, Where] = {
        layer: (0, table) for layer, table in zip(layers, start.tables, strict=True)
    }
    places.update({move.layer: (move.bank, move.experts) for move in members.moved})
    return places


def in_use(members: Members, start: Placement, layers: Sequence[int]) -> dict[int, Where]:
    """Where an attention instance finds every layer's experts."""
    places = settled(members, start, layers)
    move = members.moving
    if move is not None and members.switching:
        places[move.layer] = (move.bank, move.experts)
    return places


def to_hold(
    members: Members, start: Placement, layers: Sequence[int]
) -> dict[int, dict[int, Table]]:
    """What FFN instances have to hold: by layer, then by bank, the expert in every slot."""
    wanted = {
        layer: {bank: table} for layer, (bank, table) in settled(members, start, layers).items()
    }
    move = members.moving
    if move is not None:
        wanted[move.layer][move.bank] = move.experts
    return wanted


def followed(members: Members) -> int:
    """Number of the last move that an attention instance has made once it goes by ``members``."""
    waits = members.moving is not None and not members.switching
    return members.moves - 1 if waits else members.moves


def objection(
    tables: Sequence[Sequence[int]], contract: Contract | None, members: Members
) -> str | None:
    """Why experts cannot be moved to ``tables`` (one per MoE layer) now, or None."""
    if contract is None:
        return "there is no member that holds experts; wait until the deployment is up"
    if not contract.movable:
        return (
            "experts stay where they are while steps are replayed as graphs; start again with"
            " ffn.placement, or set pipeline.graphs: false"
        )
    if members.moving is not None:
        return f"layer {members.moving.layer} is being moved; wait until `afd ctl status` says so"
    if len(tables) != len(contract.moe_layers):
        return f"there are {len(tables)} tables for {len(contract.moe_layers)} MoE layers"
    for layer, table in zip(contract.moe_layers, tables, strict=True):
        reason = problem(table, contract.expert_slots, contract.num_experts)
        if reason is not None:
            return f"the table of layer {layer} is wrong: {reason}"
    return None


class Moves:
    """The server's part: hands out one move after the other. Feed it what members have done."""

    def __init__(self) -> None:
        self._left: list[tuple[int, Table]] = []

    @property
    def left(self) -> int:
        return len(self._left)

    def plan(self, tables: Sequence[Table], contract: Contract, members: Members) -> Members:
        """Begin to move the experts to ``tables``, see :func:`objection`; the next snapshot."""
        start = Placement(contract.expert_slots, contract.expert_map)
        now = settled(members, start, contract.moe_layers)
        wanted = zip(contract.moe_layers, tables, strict=True)
        self._left = [(layer, table) for layer, table in wanted if table != now[layer][1]]
        return self._next(msgspec.structs.replace(members, move_fault=""))

    def advance(
        self, members: Members, contract: Contract, done: Mapping[tuple[str, int, int], int]
    ) -> Members | None:
        """The next snapshot if the move under way can go on, else None.

        Args:
            done: (role, index, rank) of every registered member: the last move it has made.
        """
        move = members.moving
        if move is None:
            return None
        if not members.switching:
            ranks = itertools.product(range(contract.ffn_instances), range(contract.ffn_tp))
            if any(done.get(("ffn", *rank), 0) < members.moves for rank in ranks):
                return None
            return msgspec.structs.replace(members, switching=True)
        users = [number for (role, *_), number in done.items() if role == "attention"]
        if any(number < members.moves for number in users):
            return None
        others = [m for m in members.moved if m.layer != move.layer]
        moved = tuple(sorted([*others, move], key=lambda m: m.layer))
        return self._next(
            msgspec.structs.replace(members, moved=moved, moving=None, switching=False)
        )

    def give_up(self, members: Members, fault: str) -> Members:
        """A move that an instance cannot make is called off, and with it those behind it."""
        self._left = []
        moving = members.moving if members.switching else None
        return msgspec.structs.replace(members, moving=moving, moves_left=0, move_fault=fault)

    def _next(self, members: Members) -> Members:
        if not self._left:
            return msgspec.structs.replace(members, moves_left=0)
        layer, table = self._left.pop(0)
        bank = next((1 - m.bank for m in members.moved if m.layer == layer), 1)
        return msgspec.structs.replace(
            members,
            moving=Move(layer, bank, table),
            switching=False,
            moves=members.moves + 1,
            moves_left=len(self._left) + 1,
        )
