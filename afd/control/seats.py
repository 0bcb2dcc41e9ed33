"""Seats: which attention and FFN instances are wanted, and what is wanted of them. Pure.

A deployment has room for ``attention.max_instances`` attention instances and ``ffn.max_instances``
FFN instances (``Contract``). Operators add and remove them while it serves; supervisors start and
end the processes. Gateways send new requests only to members whose seat says "run". The experts of
an FFN instance are moved before it is removed.
"""

from __future__ import annotations

from collections.abc import Iterable

from afd.config.contract import Contract
from afd.control.messages import Members, Seat, SetSeat
from afd.control.moves import holding
from afd.placement.tables import Placement
from afd.topology import member_id

Seats = tuple[Seat, ...]
_NAMES = {"attention": "attention", "ffn": "FFN"}


def configured(attention: int, ffn: int) -> Seats:
    """The seats at the start of a deployment with so many instances."""
    wanted = (("attention", attention), ("ffn", ffn))
    return tuple(Seat(member_id(role, i)) for role, count in wanted for i in range(count))


def objection(asked: SetSeat, members: Members, contract: Contract | None) -> str | None:
    """Returns why an operator's wish cannot be met, with the remedy; None if it can.

    Args:
        contract: None while no member has told it.
    """
    role, _, index = asked.id.partition("-")
    known = {member.id for member in members.members}
    if role == "ffn" and asked.wish == "restart":
        return None if asked.id in known else f"{asked.id} is not a member; see `afd ctl status`"
    if role not in _NAMES or not (index.isdigit() or (asked.wish == "run" and not index)):
        return (
            f"{asked.id} cannot get the wish {asked.wish}; name an attention or FFN instance, such"
            " as attention-1"
        )
    if asked.wish == "run":
        if contract is None:
            return "no member has told the capacity of the deployment yet; try again"
        capacity = room(contract, role)
        if index and int(index) >= capacity:
            return f"{asked.id} does not exist with {role}.max_instances = {capacity}"
        if not index and free(members.seats, role, capacity) is None:
            return (
                f"all {capacity} {_NAMES[role]} instances are in use; start the deployment with a"
                f" larger {role}.max_instances"
            )
        return None
    if asked.wish == "restart" and asked.id not in known:
        return f"{asked.id} is not a member; see `afd ctl status`"
    if members.seat(asked.id) is None:
        return f"{asked.id} does not run; see `afd ctl status`"
    if role == "ffn":
        return _ffn_objection(asked, int(index), members, contract)
    if asked.wish == "remove" and _is_last(members, asked.id):
        return f"{asked.id} is the only attention instance; add another one first"
    return None


def _ffn_objection(
    asked: SetSeat, index: int, members: Members, contract: Contract | None
) -> str | None:
    if contract is None or not contract.elastic:
        return f"the FFN instances are fixed, so {asked.id} stays; set ffn.max_instances at start"
    if index == 0:
        return "ffn-0 leads the FFN instances and stays; name another one"
    start = Placement(contract.expert_slots, contract.expert_map)
    if asked.wish == "remove" and index in holding(members, start, contract.moe_layers):
        return f"{asked.id} holds experts; move them first, as `afd ctl remove {asked.id}` does"
    return None


def room(contract: Contract, role: str) -> int:
    """The instances of a role that can run at a time."""
    return contract.ffn_instances if role == "ffn" else contract.attention_instances


def changed(asked: SetSeat, members: Members, contract: Contract | None) -> Seats:
    """Returns the seats after a wish without an :func:`objection`."""
    name = asked.id
    if name in _NAMES:
        index = free(members.seats, name, room(contract, name) if contract else 0)
        name = member_id(name, index or 0)
    member = next((member for member in members.members if member.id == name), None)
    seat = members.seat(name)
    if asked.once and seat is not None and seat.wish != "run":
        return members.seats  # its process got SIGTERM because of this wish
    if asked.wish == "remove" and member is None:
        return _without(members.seats, name)
    ends = asked.once or asked.wish == "restart"
    generation = member.generation if ends and member is not None else 0
    return _with(members.seats, Seat(name, asked.wish, generation))


def after_joining(seats: Seats, name: str, generation: int) -> Seats:
    """Returns the seats after a member has joined: one that was started by hand gets its own."""
    seat = next((seat for seat in seats if seat.id == name), None)
    if "." in name:  # the seat is the instance's; a single rank has one until it restarts
        return _without(seats, name) if seat and seat.generation != generation else seats
    ended = seat is None or seat.generation not in (0, generation)
    return _with(seats, Seat(name)) if ended and name.partition("-")[0] in _NAMES else seats


def after_leaving(seats: Seats, name: str, generation: int) -> Seats:
    """Returns the seats after the member with this generation, or an older one, is gone."""
    seat = next((seat for seat in seats if seat.id == name), None)
    if seat is None or seat.wish == "run":
        return seats
    if seat.wish == "remove" or "." in name:
        return _without(seats, name)
    return _with(seats, Seat(name)) if 0 < seat.generation <= generation else seats


def free(seats: Seats, role: str, capacity: int) -> int | None:
    """The smallest index of an instance without a seat."""
    taken = {seat.id for seat in seats}
    return next((i for i in range(capacity) if member_id(role, i) not in taken), None)


def _is_last(members: Members, name: str) -> bool:
    """Whether no other attention instance takes requests, or is to, if this one does not."""
    ready = {member.id for member in members.of("attention", state="ready")}
    wanted = {seat.id for seat in members.seats if seat.wish == "run"} - {name}
    return not (wanted & ready if name in ready else wanted)


def _with(seats: Iterable[Seat], new: Seat) -> Seats:
    return tuple(sorted([*_without(seats, new.id), new], key=_order))


def _without(seats: Iterable[Seat], name: str) -> Seats:
    return tuple(seat for seat in seats if seat.id != name)


def _order(seat: Seat) -> tuple[str, int, str]:
    role, _, number = seat.id.partition("-")
    return role, int(number.partition(".")[0]), number


def draining(members: Members, name: str, generation: int) -> bool:
    """Whether a member is to get no new requests."""
    seat = members.seat(name)
    return seat is not None and seat.wish != "run" and seat.generation in (0, generation)
