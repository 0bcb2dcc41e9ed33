"""Seats: which attention instances are wanted, and what is wanted of them. Pure.

A deployment has room for ``attention.max_instances`` attention instances (``Contract``). Operators
add and remove them while it serves; supervisors start and end the processes, and gateways send new
requests only to members whose seat says "run". FFN ranks have a seat only until they restart.
"""

from __future__ import annotations

from collections.abc import Iterable

from afd.control.messages import Members, Seat, SetSeat
from afd.topology import member_id

Seats = tuple[Seat, ...]


def configured(instances: int) -> Seats:
    """The seats at the start of a deployment."""
    return tuple(Seat(member_id("attention", i)) for i in range(instances))


def objection(asked: SetSeat, members: Members, capacity: int | None) -> str | None:
    """Returns why an operator's wish cannot be met, with the remedy; None if it can.

    Args:
        capacity: of attention instances; None while no member has said it.
    """
    role, _, index = asked.id.partition("-")
    known = {member.id for member in members.members}
    if role == "ffn" and asked.wish == "restart":
        return None if asked.id in known else f"{asked.id} is not a member; see `afd ctl status`"
    if role != "attention" or not (index.isdigit() or (asked.wish == "run" and not index)):
        return (
            f"{asked.id} cannot get the wish {asked.wish}; name an attention instance, such as"
            " attention-1 (FFN instances can only be restarted)"
        )
    if asked.wish == "run":
        if capacity is None:
            return "no member has told the capacity of the deployment yet; try again"
        if index and int(index) >= capacity:
            return f"{asked.id} does not exist with attention.max_instances = {capacity}"
        if not index and free(members.seats, capacity) is None:
            return (
                f"all {capacity} attention instances are in use; start the deployment with a larger"
                " attention.max_instances"
            )
        return None
    if asked.wish == "restart" and asked.id not in known:
        return f"{asked.id} is not a member; see `afd ctl status`"
    if members.seat(asked.id) is None:
        return f"{asked.id} does not run; see `afd ctl status`"
    if asked.wish == "remove" and _is_last(members, asked.id):
        return f"{asked.id} is the only attention instance; add another one first"
    return None


def changed(asked: SetSeat, members: Members, capacity: int | None) -> Seats:
    """Returns the seats after a wish without an :func:`objection`."""
    name = asked.id
    if name == "attention":
        index = free(members.seats, capacity or 0)
        name = member_id("attention", index or 0)
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
    if name.startswith("attention-"):
        ended = seat is None or seat.generation not in (0, generation)
        first_rank = "." not in name  # the seat is the instance's
        return _with(seats, Seat(name)) if ended and first_rank else seats
    return _without(seats, name) if seat and seat.generation != generation else seats


def after_leaving(seats: Seats, name: str, generation: int) -> Seats:
    """Returns the seats after the member with this generation, or an older one, is gone."""
    seat = next((seat for seat in seats if seat.id == name), None)
    if seat is None or seat.wish == "run":
        return seats
    if seat.wish == "remove" or name.startswith("ffn-"):
        return _without(seats, name)
    return _with(seats, Seat(name)) if 0 < seat.generation <= generation else seats


def free(seats: Seats, capacity: int) -> int | None:
    """The smallest index of an attention instance without a seat."""
    taken = {seat.id for seat in seats}
    return next((i for i in range(capacity) if member_id("attention", i) not in taken), None)


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
