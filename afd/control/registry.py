"""The control plane's state machine, without sockets and with injected clocks.

Pass received messages to :meth:`Registry.handle` and call :meth:`Registry.tick` several times per
heartbeat; both return the messages to send. One thread owns it. Who may send what is decided before
(:mod:`afd.control.authority`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from afd.config.contract import Contract
from afd.control import admission, seats
from afd.control import messages as m
from afd.control.contenders import Contenders
from afd.control.depths import FIXED_DEPTH, DepthPolicy, DepthTuner
from afd.control.entries import Entry, reference_of
from afd.control.generations import MAX_GENERATION, Generations
from afd.control.host_table import NO_HOSTS, HostRules, HostTable
from afd.control.hosts import pid_space, process_alive
from afd.control.moves import Moves, objection
from afd.control.recovery import RecoveryWindow, generation_in, proven, resumed
from afd.control.seal import Seal, without_addresses
from afd.depth import AUTO
from afd.topology import member_id

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outgoing:
    """One message for one peer (its ZeroMQ routing id)."""

    peer: bytes
    message: m.FromServer


class Registry:
    """Registers, checks, numbers and drops members.

    Generations start from the wall clock, so that they grow over restarts of the server too. Of
    what a returning member says about an earlier run, only a snapshot with a right seal counts.

    Args:
        expected: the deployment's contract, if the server knows it; members must have this one.
        hosts: what the hosts of the deployment must share.
        attention, ffn: how many instances are wanted at the start.
        seal: key of the seals of snapshots, the same for all runs of one deployment's server.
        clock: monotonic seconds. wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        *,
        timing: m.Timing,
        seal: bytes,
        expected: Contract | None = None,
        depth: DepthPolicy = FIXED_DEPTH,
        hosts: HostRules = NO_HOSTS,
        attention: int = 0,
        ffn: int = 0,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        local_pid_space: str | None = None,
        alive: Callable[[int], bool] = process_alive,
    ) -> None:
        self.timing = timing.checked()
        self.expected = expected
        self._seal = Seal(seal)
        self._tuner = DepthTuner(depth)
        self._hosts = HostTable(hosts, timing.timeout_s, clock=clock, wall_clock=wall_clock)
        self.stopping = False
        # Complete, for attention and FFN members; for all others without addresses
        self.members = self._public = m.Members(seats=seats.configured(attention, ffn))
        self._clock = clock
        self._pid_space = pid_space() if local_pid_space is None else local_pid_space
        self._alive = alive
        self._entries: dict[str, Entry] = {}
        self._retired: dict[str, int] = {}  # id -> generation of its last dropped member
        self._contenders = Contenders(timing.timeout_s, clock)
        self._moves = Moves()
        self._generations = Generations(wall_clock)
        self._window = RecoveryWindow(timing.timeout_s, clock)
        self._ticked = clock()
        self.incarnation = time.time_ns()

    # --- what arrives ---------------------------------------------------------------------------

    def handle(self, peer: bytes, message: m.ToServer) -> list[Outgoing]:
        """Applies one message; returns the replies and broadcasts that it causes."""
        match message:
            case m.Hello():
                return self._hello(peer, message)
            case m.Heartbeat():
                return self._heartbeat(peer, message)
            case m.Bye():
                entry = self._of(peer)
                gone = [] if entry is None else self._forget([(entry, "left")])
                return [*gone, Outgoing(peer, m.Beat())]
            case m.Status():
                return [Outgoing(peer, self._public)]
            case m.HostReport():
                return [Outgoing(peer, self._hosts.report(message))]
            case m.AskContract():
                return [Outgoing(peer, m.Agreement(self._contract()))]
            case m.SetDepth():
                return self._set_depth(peer, message.depth)
            case m.Drain():
                changed = self._change(draining=message.on)
                return [*changed, Outgoing(peer, self._public)]
            case m.SetSeat():
                return self._set_seat(peer, message)
            case m.MoveExperts():
                return self._move_experts(peer, message.tables)
            case m.Shutdown():
                self.stopping = True
                return [*self.closing(stop_members=True), Outgoing(peer, self._public)]

    def tick(self) -> list[Outgoing]:
        """Drops members that are silent for too long or whose process on this host has died."""
        now = self._clock()
        pause, self._ticked = now - self._ticked, now
        if pause > self.timing.timeout_s / 2:
            # This process itself was suspended; the silence is not the members' fault.
            for entry in self._entries.values():
                entry.heard = min(now, entry.heard + pause)
        gone = [
            (entry, reason)
            for entry in self._entries.values()
            if (reason := self._death(entry, now)) is not None
        ]
        self._contenders.tick()
        return self._forget(gone)

    def closing(self, *, stop_members: bool) -> list[Outgoing]:
        """Returns the messages to send when the server stops."""
        goodbye = m.Closing(stop_members=stop_members)
        return [Outgoing(e.peer, goodbye) for e in self._entries.values() if e.peer is not None]

    # --- joining --------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: m.Hello) -> list[Outgoing]:
        name = member_id(hello.role, hello.index, hello.rank)
        entry = self._entries.get(name)
        if entry is not None and entry.peer == peer:  # our Welcome was lost or is still under way
            entry.heard = self._clock()
            return [self._welcome(entry)]
        reference = reference_of(self._entries.values(), self.expected)
        returns = hello.generation > 0 or name in self._entries or name in self._retired
        refusal = admission.objection(
            hello, reference, draining=self.members.draining, returns=returns
        )
        if refusal is not None:
            return [Outgoing(peer, m.Refused(refusal))]
        known = proven(hello, self._seal, self.incarnation)
        held = generation_in(known, name)  # by the member, from an earlier run of the server
        death = None if entry is None else self._death(entry, self._clock())
        if entry is None:
            keep = self._window.is_open and held > self._retired.get(name, 0)
        elif entry.peer is None and held >= entry.member.generation:
            keep = True
        elif death is not None:
            keep = False
        else:
            return [Outgoing(peer, self._contenders.answer(entry, peer))]
        largest = max((member.generation for member in known.members), default=0)
        generation = held if keep else self._generations.next_after(largest)
        if generation > MAX_GENERATION:
            reason = f"generation {generation} does not fit 32 bits; set the clock of this host"
            return [Outgoing(peer, m.Refused(reason))]
        # The member is accepted. Up to here nothing has changed.
        replaced = [] if keep or entry is None else [(entry, f"{death}, replaced")]
        out = self._forget(replaced)
        self._recover(known, name, hello.role)
        return [*out, *self._admit(peer, hello, generation)]

    def _contract(self) -> Contract | None:
        reference = reference_of(self._entries.values(), self.expected)
        return None if reference is None else reference[1]

    def _admit(self, peer: bytes, hello: m.Hello, generation: int) -> list[Outgoing]:
        self._generations.saw(generation)
        member = admission.member(hello, generation)
        entry = Entry(member, peer, hello.contract, self._clock())
        self._window.registered()
        self._entries[member.id] = entry
        self._contenders.accepted(member.id, peer)
        _log.info(
            "%s joined (generation %d, pid %d on %s)",
            member.id, generation, member.pid, member.host,
        )  # fmt: skip
        self._seat(seats.after_joining(self.members.seats, member.id, generation))
        out = self._change(depth=self._allowed_depth(hello.contract))
        others = [o for o in out if o.peer != peer]
        return [self._welcome(entry), *others]

    def _welcome(self, entry: Entry) -> Outgoing:
        assert entry.peer is not None
        return Outgoing(
            entry.peer,
            m.Welcome(entry.member.generation, self.incarnation, self._view(entry), self.timing),
        )

    # --- after a restart of the server ----------------------------------------------------------

    def _recover(self, known: m.Members, name: str, role: str) -> None:
        """Takes over a snapshot of an earlier run of the server, brought by this member.

        Without it, the first member back would see an empty deployment, and the data plane would
        drop peers that are well. The other members get one timeout to register again.
        """
        for member in known.members:
            self._generations.saw(member.generation)
        if not self._window.is_open:
            version = max(known.version, self.members.version)  # never falls for the member
            self.members = msgspec.structs.replace(self.members, version=version)
            return
        partial = role not in m.CONTRACT_ROLES
        for member in known.members:
            entry = self._entries.get(member.id)
            if entry is None:
                missing = member.generation > self._retired.get(member.id, 0)
            else:
                missing = entry.partial and not partial
            if missing and member.id != name:
                self._entries[member.id] = Entry(member, None, None, self._clock(), partial=partial)
        if known.version > self.members.version:
            self.members = resumed(self.members, known)
            self._tuner.adopt(known.depths, self._clock())

    # --- being a member -------------------------------------------------------------------------

    def _heartbeat(self, peer: bytes, beat: m.Heartbeat) -> list[Outgoing]:
        entry = self._of(peer)
        if entry is None:
            return [Outgoing(peer, m.Unknown())]
        entry.heard = self._clock()
        out = [Outgoing(peer, m.Beat()), *self._follow_moves(entry, beat)]
        out += self._follow_work(entry, beat)
        if m.STATES.index(beat.state) > m.STATES.index(entry.member.state):
            entry.member = msgspec.structs.replace(entry.member, state=beat.state)
            _log.info("%s is %s", entry.member.id, beat.state)
            return [*out, *self._change()]
        if beat.version != self.members.version:
            out.append(Outgoing(peer, self._view(entry)))
        return out

    def _follow_work(self, entry: Entry, beat: m.Heartbeat) -> list[Outgoing]:
        """Passes the member's work to the depth tuner, and publishes the depths if they changed."""
        contract, member = self._contract(), entry.member
        ours = contract is not None and self._tuner.chooses(self.members.depth)
        max_depth = contract.max_depth if contract is not None and ours else None
        self._tuner.note(member.id, member.generation, beat.work, self._clock(), max_depth)
        if self._tuner.depths == self.members.depths:
            return []
        self.members = msgspec.structs.replace(self.members, depths=self._tuner.depths)
        return self._change()

    def _death(self, entry: Entry, now: float) -> str | None:
        """Returns why the member counts as dead, or None if it does not."""
        member = entry.member
        local = bool(self._pid_space) and member.pid_space == self._pid_space and member.pid > 0
        if local and not self._alive(member.pid):
            return f"process {member.pid} died"
        silence = now - entry.heard
        if silence > self.timing.timeout_s:
            return f"silent for {silence:.1f} s"
        return None

    def _forget(self, gone: list[tuple[Entry, str]]) -> list[Outgoing]:
        if not gone:
            return []
        for entry, reason in gone:
            member = entry.member
            del self._entries[member.id]
            self._retired[member.id] = member.generation
            self._seat(seats.after_leaving(self.members.seats, member.id, member.generation))
            _log.info("%s is gone (generation %d): %s", member.id, member.generation, reason)
        in_charge = any(e.member.role in m.CONTRACT_ROLES for e in self._entries.values())
        if not in_charge:  # the next members start with the placement of their contract
            self._moves = Moves()
            self.members = msgspec.structs.replace(
                self.members, moved=(), moving=None, switching=False, moves_left=0
            )
        self._advance_moves()
        return self._change(draining=self.members.draining and in_charge)

    # --- operator -------------------------------------------------------------------------------

    def _set_depth(self, peer: bytes, depth: int | None) -> list[Outgoing]:
        contract = self._contract()
        largest = contract.max_depth if contract is not None else None
        if depth is not None and depth != AUTO and not 1 <= depth <= (largest or depth):
            allowed = "at least 1" if largest is None else f"from 1 to {largest} (max_depth)"
            return [Outgoing(peer, m.Refused(f"depth {depth} refused: it must be {allowed}"))]
        changed = self._change(depth=depth)
        return [*changed, Outgoing(peer, self._public)]

    def _set_seat(self, peer: bytes, asked: m.SetSeat) -> list[Outgoing]:
        contract = self._contract()
        reason = seats.objection(asked, self.members, contract)
        if reason is not None:
            return [Outgoing(peer, m.Refused(reason))]
        _log.info("wish for %s: %s", asked.id, asked.wish)
        self._seat(seats.changed(asked, self.members, contract))
        return [*self._change(), Outgoing(peer, self._public)]

    def _seat(self, new: seats.Seats) -> None:
        self.members = msgspec.structs.replace(self.members, seats=new)

    def _move_experts(self, peer: bytes, tables: tuple[tuple[int, ...], ...]) -> list[Outgoing]:
        contract = self._contract()
        reason = objection(tables, contract, self.members)
        if reason is not None or contract is None:
            return [Outgoing(peer, m.Refused(f"experts not moved: {reason}"))]
        self.members = self._moves.plan(tables, contract, self.members)
        _log.info("moving the experts of %d layers", self.members.moves_left)
        return [*self._change(), Outgoing(peer, self._public)]

    def _follow_moves(self, entry: Entry, beat: m.Heartbeat) -> list[Outgoing]:
        """Applies what a member reports about the current expert move."""
        entry.moves = beat.moves
        under_way = self.members.moving is not None and beat.moves == self.members.moves - 1
        if beat.move_fault and under_way:
            fault = f"{entry.member.id}: {beat.move_fault}"
            _log.error("experts not moved: %s", fault)
            self.members = self._moves.give_up(self.members, fault)
            return self._change()
        return self._change() if self._advance_moves() else []

    def _advance_moves(self) -> bool:
        contract = self._contract()
        if contract is None:
            return False
        done = {
            (e.member.role, e.member.index, e.member.rank): e.moves for e in self._entries.values()
        }
        following = self._moves.advance(self.members, contract, done)
        if following is None:
            return False
        self.members = following
        if following.moving is None:
            _log.info("all experts have moved")
        return True

    def _allowed_depth(self, contract: Contract | None) -> int | None:
        """The runtime depth, or None if it is above the new contract's ``max_depth``."""
        depth = self.members.depth
        if depth is not None and contract is not None and depth > contract.max_depth:
            _log.warning("runtime depth %d is above max_depth %d: reset", depth, contract.max_depth)
            return None
        return depth

    # --- snapshot -------------------------------------------------------------------------------

    def _of(self, peer: bytes) -> Entry | None:
        return next((e for e in self._entries.values() if e.peer == peer), None)

    def _change(
        self,
        *,
        depth: int | msgspec.UnsetType | None = msgspec.UNSET,
        draining: bool | None = None,
    ) -> list[Outgoing]:
        """Makes the next snapshot from the entries and sends it to every member."""
        last = self.members
        entries = sorted(
            self._entries.values(), key=lambda e: (e.member.role, e.member.index, e.member.rank)
        )
        snapshot = msgspec.structs.replace(
            last,
            version=last.version + 1,
            members=tuple(e.member for e in entries),
            depth=last.depth if depth is msgspec.UNSET else depth,
            draining=last.draining if draining is None else draining,
        )
        self._public = self._seal.put_on(without_addresses(snapshot))
        complete = tuple(e.member for e in entries if not e.partial)
        self.members = self._seal.put_on(msgspec.structs.replace(snapshot, members=complete))
        return [
            Outgoing(e.peer, self._view(e)) for e in self._entries.values() if e.peer is not None
        ]

    def _view(self, entry: Entry) -> m.Members:
        """The snapshot for a member: only attention and FFN members get addresses."""
        return self.members if entry.member.role in m.CONTRACT_ROLES else self._public

    def holder(self, peer: bytes) -> str | None:
        """The id of the member that registered through this peer, or None."""
        entry = self._of(peer)
        return None if entry is None else entry.member.id
