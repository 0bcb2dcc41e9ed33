"""The protocol that moves experts while the deployment serves, as pure functions.

Layers move one after the other. First, every FFN instance loads the layer's new experts into the
layer's other *bank* and reports it. Then every attention instance uses them from its next step on
and reports it; after that, no request refers to the old bank. Ids on the wire name the bank, so
instances do not have to switch at the same time.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from afd.config.contract import Contract
from afd.control.messages import Members, Move
from afd.placement.tables import Placement, Table, holders, problem

Where = tuple[int, Table]
"""(bank, expert in every slot) of one layer."""


def settled(members: Members, start: Placement, layers: Sequence[int]) -> dict[int, Where]:
    """Where every layer's experts are, without the current move."""
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
    """What FFN instances must hold: by layer, then by bank, the expert in every slot."""
    wanted = {
        layer: {bank: table} for layer, (bank, table) in settled(members, start, layers).items()
    }
    move = members.moving
    if move is not None:
        wanted[move.layer][move.bank] = move.experts
    return wanted


def followed(members: Members) -> int:
    """Number of the last move that an attention instance has made once it uses ``members``."""
    waits = members.moving is not None and not members.switching
    return members.moves - 1 if waits else members.moves


def holding(members: Members, start: Placement, layers: Sequence[int]) -> tuple[int, ...]:
    """Returns the FFN instances that hold experts, or are to hold some after the current move."""
    tables = [table for _, table in settled(members, start, layers).values()]
    if members.moving is not None:
        tables.append(members.moving.experts)
    return holders(tables, start.bounds)


def completed(members: Members) -> int:
    """Number of the last move that all members have made."""
    return members.moves if members.moving is None else members.moves - 1


def objection(
    tables: Sequence[Sequence[int]], contract: Contract | None, members: Members
) -> str | None:
    """Returns why experts cannot be moved to ``tables`` (one per MoE layer) now, or None."""
    if contract is None:
        return "no member holds experts; wait until the deployment is up"
    if contract.ffn_instances == 1:  # none can be added either
        return "there is one FFN instance, which holds all experts; there is nothing to move"
    if members.moving is not None:
        return (
            f"layer {members.moving.layer} is being moved; wait until `afd ctl status` shows none"
        )
    if len(tables) != len(contract.moe_layers):
        return f"there are {len(tables)} tables for {len(contract.moe_layers)} MoE layers"
    for layer, table in zip(contract.moe_layers, tables, strict=True):
        reason = problem(table, contract.expert_slots, contract.num_experts)
        if reason is not None:
            return f"the table of layer {layer} is wrong: {reason}"
    start = Placement(contract.expert_slots, contract.expert_map)
    held = holding(members, start, contract.moe_layers)
    then = {*holders(map(tuple, tables), start.bounds)}
    if not contract.elastic and len(then) < contract.ffn_instances:
        return "an FFN instance would hold no experts, which needs ffn.max_instances in the file"
    new = then - {*held}
    ready = {m.index for m in members.of("ffn", state="ready") if not m.rank}
    if new - ready:
        return f"ffn-{min(new - ready)} is not ready; add it with `afd ctl add ffn` first"
    return None


class Moves:
    """The server's part: starts one move after the other as members report progress."""

    def __init__(self) -> None:
        self._left: list[tuple[int, Table]] = []

    @property
    def left(self) -> int:
        return len(self._left)

    def plan(self, tables: Sequence[Table], contract: Contract, members: Members) -> Members:
        """Starts to move the experts to ``tables``; returns the next snapshot."""
        start = Placement(contract.expert_slots, contract.expert_map)
        now = settled(members, start, contract.moe_layers)
        wanted = zip(contract.moe_layers, tables, strict=True)
        self._left = [(layer, table) for layer, table in wanted if table != now[layer][1]]
        return self._next(msgspec.structs.replace(members, move_fault=""))

    def advance(
        self, members: Members, contract: Contract, done: Mapping[tuple[str, int, int], int]
    ) -> Members | None:
        """Returns the next snapshot if the current move can continue, else None.

        Args:
            done: (role, index, rank) of every registered member: the last move it has made.
        """
        move = members.moving
        if move is None:
            return None
        if not members.switching:
            start = Placement(contract.expert_slots, contract.expert_map)
            users = holding(members, start, contract.moe_layers)
            ranks = itertools.product(users, range(contract.ffn_tp))
            if any(done.get(("ffn", *rank), 0) < members.moves for rank in ranks):
                return None
            return msgspec.structs.replace(members, switching=True)
        if any(n < members.moves for (role, *_), n in done.items() if role == "attention"):
            return None
        others = [m for m in members.moved if m.layer != move.layer]
        moved = tuple(sorted([*others, move], key=lambda m: m.layer))
        return self._next(
            msgspec.structs.replace(members, moved=moved, moving=None, switching=False)
        )

    def give_up(self, members: Members, fault: str) -> Members:
        """Cancels the current move, which an instance cannot make, and all moves after it."""
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
