"""Who is a member: the control plane's state machine, without sockets and with injected clocks.

Feed it what arrives (:meth:`Registry.handle`) and call :meth:`Registry.tick` several times per
heartbeat; both return what has to be sent. One thread owns it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from afd.control import admission
from afd.control import messages as m
from afd.control.contract import Contract
from afd.control.depths import FIXED_DEPTH, DepthPolicy, DepthTuner
from afd.control.generations import MAX_GENERATION, Generations
from afd.control.hosts import pid_space, process_alive
from afd.control.moves import Moves, objection
from afd.depth import AUTO

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outgoing:
    """One message for one peer (its ZeroMQ routing id)."""

    peer: bytes
    message: m.FromServer


@dataclass
class _Entry:
    """A member as the server sees it. ``peer`` is None while it is only known from another
    member's snapshot and has not yet spoken to this run of the server."""

    member: m.Member
    peer: bytes | None
    contract: Contract | None
    heard: float  # seconds of the monotonic clock
    moves: int = 0  # the last move of experts that it has made


class Registry:
    """Registers, checks, numbers and forgets members.

    ``clock`` gives monotonic seconds, ``wall_clock`` seconds since 1970. Generations start from the
    wall clock so that they grow over restarts of the server too; the largest one that any member
    reports is respected as well. ``expected`` is the deployment's contract if the server knows it.
    """

    def __init__(
        self,
        *,
        timing: m.Timing,
        expected: Contract | None = None,
        depth: DepthPolicy = FIXED_DEPTH,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        local_pid_space: str | None = None,
        alive: Callable[[int], bool] = process_alive,
    ) -> None:
        self.timing = timing.checked()
        self.expected = expected
        self._tuner = DepthTuner(depth)
        self.stopping = False
        self.members = m.Members()
        self._clock = clock
        self._pid_space = pid_space() if local_pid_space is None else local_pid_space
        self._alive = alive
        self._entries: dict[str, _Entry] = {}
        self._retired: dict[str, int] = {}  # id -> generation of its last forgotten member
        self._contenders: dict[tuple[str, bytes], float] = {}  # second process for an id -> since
        self._moves = Moves()
        self._generations = Generations(wall_clock)
        self._started = self._ticked = clock()
        self.incarnation = time.time_ns()

    # --- what arrives ---------------------------------------------------------------------------

    def handle(self, peer: bytes, message: m.ToServer) -> list[Outgoing]:
        """Applies one message; returns the answers and broadcasts it causes."""
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
                return [Outgoing(peer, self.members)]
            case m.AskContract():
                return [Outgoing(peer, m.Agreement(self._contract()))]
            case m.SetDepth():
                return self._set_depth(peer, message.depth)
            case m.Drain():
                changed = self._change(draining=message.on)
                return [*changed, Outgoing(peer, self.members)]
            case m.MoveExperts():
                return self._move_experts(peer, message.tables)
            case m.Shutdown():
                self.stopping = True
                return [*self.closing(stop_members=True), Outgoing(peer, self.members)]

    def tick(self) -> list[Outgoing]:
        """Forgets members that are silent for too long or whose process on this host has died."""
        now = self._clock()
        pause, self._ticked = now - self._ticked, now
        if pause > self.timing.timeout_s / 2:
            # This process itself stood still (suspended, starved): that is not its members' fault.
            for entry in self._entries.values():
                entry.heard = min(now, entry.heard + pause)
        gone = [
            (entry, reason)
            for entry in self._entries.values()
            if (reason := self._death(entry, now)) is not None
        ]
        patience = 2 * self.timing.timeout_s
        self._contenders = {k: t for k, t in self._contenders.items() if now - t < patience}
        return self._forget(gone)

    def closing(self, *, stop_members: bool) -> list[Outgoing]:
        """What to tell the members when the server stops."""
        return self._broadcast(m.Closing(stop_members=stop_members))

    # --- joining --------------------------------------------------------------------------------

    def _hello(self, peer: bytes, hello: m.Hello) -> list[Outgoing]:
        name = m.member_id(hello.role, hello.index, hello.rank)
        entry = self._entries.get(name)
        if entry is not None and entry.peer == peer:  # our Welcome was lost or is still under way
            entry.heard = self._clock()
            return [self._welcome(entry)]
        objection = admission.objection(hello, self._reference(), self.members.draining)
        if objection is not None:
            _log.warning("%s", objection)
            return [Outgoing(peer, m.Refused(objection))]
        self._recover(hello)
        out: list[Outgoing] = []
        entry = self._entries.get(name)
        keep = False  # the generation that the member already has
        if entry is None:
            keep = self._recovering() and hello.generation > self._retired.get(name, 0)
        elif entry.peer is None and entry.member.generation == hello.generation:
            keep = True
        elif (reason := self._death(entry, self._clock())) is not None:
            out += self._forget([(entry, f"{reason}, replaced")])
        else:
            return [Outgoing(peer, self._contend(entry, peer))]
        return [*out, *self._admit(peer, hello, keep=keep)]

    def _reference(self) -> tuple[str, Contract] | None:
        """Who holds the contract that others must equal, and the contract.

        All holders have equal ones, so the first of them stands for all; with the last holder the
        reference is gone too, and a new configuration may begin.
        """
        if self.expected is not None:
            return "the control plane", self.expected
        holders = [
            (entry.member.generation, entry.member.id, entry.contract)
            for entry in self._entries.values()
            if entry.contract is not None
        ]
        if not holders:
            return None
        _, holder, contract = min(holders, key=lambda h: h[0])
        return holder, contract

    def _contract(self) -> Contract | None:
        reference = self._reference()
        return None if reference is None else reference[1]

    def _contend(self, entry: _Entry, peer: bytes) -> m.Wait | m.Refused:
        """A second process for a registered id: final only once the first has given a sign of life
        after the second came, because a killed one looks alive until its timeout."""
        holder = entry.member
        reason = (
            f"{holder.id} is already running as pid {holder.pid} on host {holder.host}; "
            "stop it or use another --index"
        )
        key = (holder.id, peer)
        since = self._contenders.setdefault(key, self._clock())
        if entry.peer is not None and entry.heard > since:
            del self._contenders[key]
            _log.warning("refused a second %s: %s", holder.id, reason)
            return m.Refused(reason)
        return m.Wait(reason)

    def _admit(self, peer: bytes, hello: m.Hello, *, keep: bool) -> list[Outgoing]:
        if keep:
            generation = hello.generation
            self._generations.saw(generation)
        else:
            generation = self._generations.next_after(hello.generation)
        if generation > MAX_GENERATION:
            reason = f"generation {generation} does not fit 32 bits; set the clock of this host"
            return [Outgoing(peer, m.Refused(reason))]
        member = admission.member(hello, generation)
        entry = _Entry(member, peer, hello.contract, self._clock())
        self._entries[member.id] = entry
        self._contenders.pop((member.id, peer), None)
        _log.info(
            "%s joined (generation %d, pid %d on %s)",
            member.id, generation, member.pid, member.host,
        )  # fmt: skip
        out = self._change(depth=self._allowed_depth(hello.contract))
        others = [o for o in out if o.peer != peer]
        return [self._welcome(entry), *others]

    def _welcome(self, entry: _Entry) -> Outgoing:
        assert entry.peer is not None
        welcome = m.Welcome(entry.member.generation, self.incarnation, self.members, self.timing)
        return Outgoing(entry.peer, welcome)

    # --- after a restart of the server ----------------------------------------------------------

    def _recovering(self) -> bool:
        """True shortly after the start, while members of an earlier run may come back."""
        return self._clock() - self._started <= self.timing.timeout_s

    def _recover(self, hello: m.Hello) -> None:
        """Takes over what a returning member knows of the deployment.

        Without this, the first one back would be told that it is alone, and the data plane would
        drop peers that are well. The others have one timeout to speak up themselves.
        """
        known = hello.known
        if known is None or hello.incarnation == self.incarnation or not self._recovering():
            return
        for member in known.members:
            self._generations.saw(member.generation)
            if (
                member.id != m.member_id(hello.role, hello.index, hello.rank)
                and member.id not in self._entries
                and member.generation > self._retired.get(member.id, 0)
            ):
                self._entries[member.id] = _Entry(member, None, None, self._clock())
        if known.version > self.members.version:
            self.members = msgspec.structs.replace(
                self.members,
                version=known.version,
                depth=known.depth,
                depths=known.depths,
                draining=known.draining,
                moved=known.moved,
                moving=known.moving,
                switching=known.switching,
                moves=known.moves,
                moves_left=int(known.moving is not None),  # those behind it were known here only
            )
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
            out.append(Outgoing(peer, self.members))
        return out

    def _follow_work(self, entry: _Entry, beat: m.Heartbeat) -> list[Outgoing]:
        """Where measured step times choose the depth, another one may follow from them."""
        contract, member = self._contract(), entry.member
        ours = contract is not None and self._tuner.chooses(self.members.depth)
        max_depth = contract.max_depth if contract is not None and ours else None
        self._tuner.note(member.id, member.generation, beat.work, self._clock(), max_depth)
        if self._tuner.depths == self.members.depths:
            return []
        self.members = msgspec.structs.replace(self.members, depths=self._tuner.depths)
        return self._change()

    def _death(self, entry: _Entry, now: float) -> str | None:
        """Why the member counts as dead, or None if it does not."""
        member = entry.member
        local = bool(self._pid_space) and member.pid_space == self._pid_space and member.pid > 0
        if local and not self._alive(member.pid):
            return f"process {member.pid} died"
        silence = now - entry.heard
        if silence > self.timing.timeout_s:
            return f"silent for {silence:.1f} s"
        return None

    def _forget(self, gone: list[tuple[_Entry, str]]) -> list[Outgoing]:
        if not gone:
            return []
        for entry, reason in gone:
            member = entry.member
            del self._entries[member.id]
            self._retired[member.id] = member.generation
            _log.info("%s is gone (generation %d): %s", member.id, member.generation, reason)
        in_charge = any(e.member.role in m.CONTRACT_ROLES for e in self._entries.values())
        if not in_charge:  # those who come next begin where their contract says
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
        at_most = depth if largest is None else largest
        if depth is not None and depth != AUTO and not 1 <= depth <= at_most:
            allowed = "at least 1" if largest is None else f"from 1 to {largest} (max_depth)"
            return [Outgoing(peer, m.Refused(f"depth {depth} refused: it must be {allowed}"))]
        changed = self._change(depth=depth)
        return [*changed, Outgoing(peer, self.members)]

    def _move_experts(self, peer: bytes, tables: tuple[tuple[int, ...], ...]) -> list[Outgoing]:
        contract = self._contract()
        reason = objection(tables, contract, self.members)
        if reason is not None or contract is None:
            return [Outgoing(peer, m.Refused(f"experts not moved: {reason}"))]
        self.members = self._moves.plan(tables, contract, self.members)
        _log.info("experts of %d layers are to move", self.members.moves_left)
        return [*self._change(), Outgoing(peer, self.members)]

    def _follow_moves(self, entry: _Entry, beat: m.Heartbeat) -> list[Outgoing]:
        """What a member says of the move of experts that is under way."""
        entry.moves = beat.moves
        under_way = self.members.moving is not None and beat.moves == self.members.moves - 1
        if beat.move_fault and under_way:
            fault = f"{entry.member.id}: {beat.move_fault}"
            _log.error("experts stay where they are: %s", fault)
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
            _log.info("experts have moved")
        return True

    def _allowed_depth(self, contract: Contract | None) -> int | None:
        """The runtime depth, or None where a new contract has no room for it."""
        depth = self.members.depth
        if depth is not None and contract is not None and depth > contract.max_depth:
            _log.warning("runtime depth %d is above max_depth %d: reset", depth, contract.max_depth)
            return None
        return depth

    # --- snapshot -------------------------------------------------------------------------------

    def _of(self, peer: bytes) -> _Entry | None:
        return next((e for e in self._entries.values() if e.peer == peer), None)

    def _change(
        self,
        *,
        depth: int | msgspec.UnsetType | None = msgspec.UNSET,
        draining: bool | None = None,
    ) -> list[Outgoing]:
        """Makes the next snapshot from the entries and sends it to every member."""
        last = self.members
        self.members = msgspec.structs.replace(
            last,
            version=last.version + 1,
            members=tuple(
                sorted(
                    (e.member for e in self._entries.values()),
                    key=lambda x: (x.role, x.index, x.rank),
                )
            ),
            depth=last.depth if depth is msgspec.UNSET else depth,
            draining=last.draining if draining is None else draining,
        )
        return self._broadcast(self.members)

    def _broadcast(self, message: m.FromServer) -> list[Outgoing]:
        return [Outgoing(e.peer, message) for e in self._entries.values() if e.peer is not None]
