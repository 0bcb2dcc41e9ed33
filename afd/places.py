"""Which host of a deployment runs which instances. Pure functions.

An instance stays on one host with all of its ranks: they add up every layer's results, which only
the links inside a host carry fast enough. FFN instances are spread over the hosts, and so are
attention instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Pool:
    """The instances of one role.

    each: accelerators per instance; 0 if they run on CPUs. started: so many run from the start and
    are spread by themselves; the others run once an operator adds them.
    """

    name: str
    instances: int
    each: int
    started: int = 0


@dataclass(frozen=True)
class HostOffer:
    """What one host of the deployment file offers.

    accelerators: how many it has; None: no limit.
    attention, ffn: the instances that it runs; None: :func:`place` chooses.
    """

    name: str
    accelerators: int | None = None
    attention: tuple[int, ...] | None = None
    ffn: tuple[int, ...] | None = None

    def given(self, pool: Pool) -> tuple[int, ...] | None:
        return self.attention if pool.name == "attention" else self.ffn


@dataclass(frozen=True)
class HostPlaces:
    """The instances of one host, by number. name: "" if the deployment file names no hosts.

    spare, spare_ffn: instances that run there once an operator adds them.
    """

    name: str
    attention: tuple[int, ...]
    ffn: tuple[int, ...]
    spare: tuple[int, ...] = ()
    spare_ffn: tuple[int, ...] = ()

    def has(self, role: str, index: int) -> bool:
        attention = role == "attention"
        own = (self.attention, self.spare) if attention else (self.ffn, self.spare_ffn)
        return any(index in some for some in own)

    def started(self, attention: int, ffn: int) -> HostPlaces:
        """The same, with the instances from number ``attention`` or ``ffn`` on as spare ones."""
        first = tuple(i for i in self.attention if i < attention)
        second = tuple(j for j in self.ffn if j < ffn)
        spare = self.attention[len(first) :], self.ffn[len(second) :]
        return HostPlaces(self.name, first, second, *spare)


def place(offers: Sequence[HostOffer], attention: Pool, ffn: Pool) -> tuple[HostPlaces, ...]:
    """Returns the instances of every host, in the order of ``offers``.

    Instances that no host names go to the hosts that leave the choice: FFN instances first, each
    to the host with the fewest FFN instances; then attention instances, each to the host with the
    most free accelerators (on CPUs: with the fewest processes). Ties go to the first host. Of the
    started ones, and of the others, the numbers of a host are consecutive, as far as given ones
    allow.

    Raises:
        ValueError: an instance is named twice or does not exist, or the hosts have too few
            accelerators; one sentence with the remedy.
    """
    rooms = [_Room(offer, offer.accelerators) for offer in offers]
    for pool in (ffn, attention):
        _take_given(rooms, pool)
    for pool in (ffn, attention):
        _spread(rooms, pool, range(pool.started))
        _spread(rooms, pool, range(pool.started, pool.instances))
    return tuple(
        HostPlaces(room.offer.name, tuple(room.held["attention"]), tuple(room.held["ffn"]))
        for room in rooms
    )


@dataclass
class _Room:
    """A host while instances are placed. free: accelerators that are left; None: no limit."""

    offer: HostOffer
    free: int | None
    held: dict[str, list[int]] = field(default_factory=lambda: {"attention": [], "ffn": []})
    counts: dict[str, int] = field(default_factory=lambda: {"attention": 0, "ffn": 0})

    def take(self, pool: Pool, count: int = 1) -> None:
        self.counts[pool.name] += count
        if self.free is not None:
            self.free -= count * pool.each

    def fits(self, pool: Pool) -> bool:
        return self.free is None or self.free >= pool.each

    def load(self, pool: Pool) -> tuple[int, int]:
        """Sort key: the host with the smallest one takes the next instance."""
        free = 0 if self.free is None else self.free
        if pool.name == "ffn":
            return self.counts["ffn"], -free
        return (-free, 0) if pool.each else (sum(self.counts.values()), 0)


def _take_given(rooms: Sequence[_Room], pool: Pool) -> None:
    """Books the instances that the file places. Raises ValueError."""
    holders: dict[int, str] = {}
    for room in rooms:
        for number in room.offer.given(pool) or ():
            name, other = room.offer.name, holders.get(number)
            if number >= pool.instances:
                raise ValueError(
                    f"host {name} runs {pool.name} instance {number}, but {pool.name}.instances is"
                    f" {pool.instances}; use numbers from 0 to {pool.instances - 1}"
                )
            if other is not None:
                raise ValueError(
                    f"{pool.name} instance {number} is on host {other} and on host {name};"
                    " give it to one of them"
                )
            holders[number] = name
            room.held[pool.name].append(number)
            room.take(pool)
        if room.free is not None and room.free < 0:
            total = room.offer.accelerators
            raise ValueError(
                f"host {room.offer.name} has {total} accelerators, but its instances need"
                f" {(total or 0) - room.free}; move instances to another host"
            )


def _spread(rooms: Sequence[_Room], pool: Pool, numbers: Sequence[int]) -> None:
    """Places those of the instances that no host names. Raises ValueError."""
    given = {number for room in rooms for number in room.held[pool.name]}
    left = [number for number in numbers if number not in given]
    open_rooms = [room for room in rooms if room.offer.given(pool) is None]
    if left and not open_rooms:
        names = ", ".join(map(str, left))
        raise ValueError(
            f"no host runs {pool.name} instance {names}; add it to a host, or leave out"
            f" {pool.name} of a host to have it placed there"
        )
    shares = {id(room): 0 for room in open_rooms}
    for number in left:
        fitting = [room for room in open_rooms if room.fits(pool)]
        if not fitting:
            raise ValueError(_too_few(rooms, pool, number))
        chosen = min(fitting, key=lambda room: room.load(pool))
        chosen.take(pool)
        shares[id(chosen)] += 1
    start = 0
    for room in open_rooms:
        count = shares[id(room)]
        room.held[pool.name].extend(left[start : start + count])
        room.held[pool.name].sort()
        start += count


def _too_few(rooms: Sequence[_Room], pool: Pool, number: int) -> str:
    free = ", ".join(f"{room.offer.name} {room.free}" for room in rooms)
    ranks = f" for its {pool.each} ranks" if pool.each > 1 else ""
    return (
        f"no host has {pool.each} free accelerator{'s' if pool.each > 1 else ''}{ranks} for"
        f" {pool.name} instance {number} (free: {free}); add a host, or use fewer instances"
    )
