"""Everything that travels over the control plane: frozen structs, one tagged union, msgpack.

A member speaks ``Hello``, ``Heartbeat``, ``Bye``; an operator speaks ``Status``, ``SetDepth``,
``Drain``, ``MoveExperts``, ``AskContract``, ``Shutdown``; the server answers with ``Welcome``,
``Wait``, ``Refused``, ``Unknown``, ``Beat``, ``Members``, ``Agreement`` and ``Closing``. Every
message is one ZeroMQ frame.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from afd.control.contract import Contract
from afd.errors import ConfigError

PROTOCOL = 3
"""Raised whenever a message changes its meaning; members of another protocol are refused."""

State: TypeAlias = Literal["starting", "ready", "draining"]
STATES: tuple[State, ...] = ("starting", "ready", "draining")
"""The states of a member, in the only order in which it may pass through them."""

CONTRACT_ROLES = ("attention", "ffn")
ROLES = (*CONTRACT_ROLES, "gateway")


def member_id(role: str, index: int, rank: int = 0) -> str:
    """The member's name everywhere: ``member_id("ffn", 1) == "ffn-1"``. The first rank of an FFN
    instance has the instance's name, the second one of this is ``ffn-1.1``."""
    return f"{role}-{index}.{rank}" if rank else f"{role}-{index}"


class Timing(msgspec.Struct, frozen=True):
    """How often both sides send a sign of life, and after which silence the other is gone (s)."""

    interval_s: float = 0.5
    timeout_s: float = 3.0

    def checked(self) -> Timing:
        """This timing; ConfigError if one lost heartbeat would already count as death."""
        if self.interval_s <= 0 or self.timeout_s < 2 * self.interval_s:
            raise ConfigError(
                f"control heartbeat of {self.interval_s} s with a timeout of {self.timeout_s} s "
                "would drop members that are alive; set the timeout to at least twice the heartbeat"
            )
        return self


class Member(msgspec.Struct, frozen=True):
    """One registered process. ``addresses`` are those of its Region (see afd_comm),
    ``order_addresses`` those of the one in which an FFN rank takes orders."""

    role: str
    index: int
    generation: int
    rank: int = 0
    addresses: tuple[str, ...] = ()
    order_addresses: tuple[str, ...] = ()
    api_url: str = ""
    metrics_url: str = ""
    pid: int = 0
    state: State = "starting"
    host: str = ""
    pid_space: str = ""  # where `pid` is valid, see hosts.pid_space()

    @property
    def id(self) -> str:
        return member_id(self.role, self.index, self.rank)


class Move(msgspec.Struct, frozen=True):
    """One layer's experts in another place than at the start: the expert in every slot, and the
    bank that they are in (see :mod:`afd.control.moves`)."""

    layer: int
    bank: int
    experts: tuple[int, ...]


class Members(msgspec.Struct, frozen=True, tag="members"):
    """The whole deployment as one immutable snapshot; ``version`` grows with every change.

    ``depth`` is the operator's runtime depth (None: the configured one holds; AUTO of afd/depth.py:
    ``depths`` do). ``depths`` are (bucket, depth) of decode steps, where measured step times choose
    the depth. Members come sorted by role, index and rank.

    ``moved`` are the layers whose experts are not where the contract has them. ``moving`` is the
    move under way, number ``moves`` of all so far, which attention instances are to follow once
    ``switching``; ``moves_left`` counts it and those behind it. ``move_fault`` says why the last
    ones were called off.
    """

    version: int = 0
    members: tuple[Member, ...] = ()
    depth: int | None = None
    depths: tuple[tuple[int, int], ...] = ()
    draining: bool = False
    moved: tuple[Move, ...] = ()
    moving: Move | None = None
    switching: bool = False
    moves: int = 0
    moves_left: int = 0
    move_fault: str = ""

    def find(self, role: str, index: int, rank: int = 0) -> Member | None:
        """The member, or None while it is not registered."""
        wanted = (role, index, rank)
        return next((m for m in self.members if (m.role, m.index, m.rank) == wanted), None)

    def of(self, role: str, *, state: State | None = None) -> tuple[Member, ...]:
        """All members of a role (in one state, if given), in the order of index and rank."""
        return tuple(m for m in self.members if m.role == role and state in (None, m.state))


# --- member -> server -------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Asks to be a member; repeated until answered, so it must be (and is) idempotent.

    ``generation`` is 0 at the first join. A member that was welcomed before sends its generation,
    the ``incarnation`` of the server that gave it and its last snapshot: a restarted server
    rebuilds its registry from them.
    """

    role: str
    index: int
    contract: Contract | None
    rank: int = 0
    addresses: tuple[str, ...] = ()
    order_addresses: tuple[str, ...] = ()
    api_url: str = ""
    metrics_url: str = ""
    pid: int = 0
    host: str = ""
    pid_space: str = ""
    state: State = "starting"
    generation: int = 0
    incarnation: int = 0
    known: Members | None = None
    protocol: int = PROTOCOL


class BucketSteps(msgspec.Struct, frozen=True):
    """Decode steps of up to ``rows`` rows at one depth, and the time from each one's start to the
    next one's: see afd/decode_steps.py."""

    rows: int
    depth: int
    steps: int
    seconds: float


class Work(msgspec.Struct, frozen=True):
    """What a member has done since its start: seconds that its own stage took and that it waited
    for the other side inside of steps; on attention instances the decode steps."""

    busy_s: float = 0.0
    waited_s: float = 0.0
    steps: tuple[BucketSteps, ...] = ()


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A member's sign of life; carries its state and the version it knows, so that nothing that
    was lost on the way stays lost for longer than one heartbeat.

    ``moves``: number of the last move of experts that it has made. ``move_fault``: why it cannot
    make the one under way, if it cannot.
    """

    state: State
    version: int
    moves: int = 0
    move_fault: str = ""
    work: Work = Work()


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The member leaves; answered with Beat, so that it can close once this has arrived."""


# --- operator -> server -----------------------------------------------------------------------


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Answered with Members."""


class AskContract(msgspec.Struct, frozen=True, tag="ask_contract"):
    """Answered with Agreement."""


class SetDepth(msgspec.Struct, frozen=True, tag="set_depth"):
    """Sets the runtime depth (None: back to the configured one; AUTO of afd/depth.py: chosen from
    measured step times); answered with Members."""

    depth: int | None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Starts (or calls off) draining the deployment; answered with Members."""

    on: bool = True


class MoveExperts(msgspec.Struct, frozen=True, tag="move_experts"):
    """Moves the experts while the deployment serves: the expert in every slot, for every MoE layer
    (afd/placement.py); answered with Members."""

    tables: tuple[tuple[int, ...], ...]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ends the deployment: members are told to stop, then the server stops."""


# --- server -> member or operator -------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The answer to an accepted Hello. ``incarnation`` names this run of the server."""

    generation: int
    incarnation: int
    members: Members
    timing: Timing


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Not yet: another process holds the id and it is not known whether it lives. Ask again."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A final no; ``reason`` is for the user and names the cause and the remedy."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The server does not know the sender (it restarted, or it gave it up): say Hello again."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The server's sign of life."""


class Agreement(msgspec.Struct, frozen=True, tag="agreement"):
    """What all members share; None while nobody is there who brought a contract."""

    contract: Contract | None


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    """The server stops; ``stop_members``: the operator ended the whole deployment."""

    stop_members: bool = False


FromMember: TypeAlias = Hello | Heartbeat | Bye
FromOperator: TypeAlias = Status | AskContract | SetDepth | Drain | MoveExperts | Shutdown
ToServer: TypeAlias = FromMember | FromOperator
FromServer: TypeAlias = Welcome | Wait | Refused | Unknown | Beat | Members | Agreement | Closing

_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


def encode(message: ToServer | FromServer) -> bytes:
    return _encoder.encode(message)


def decode_to_server(frame: bytes) -> ToServer:
    """Raises msgspec.DecodeError (ValidationError is one) on anything that is not a message."""
    return _to_server.decode(frame)


def decode_from_server(frame: bytes) -> FromServer:
    """Raises msgspec.DecodeError (ValidationError is one) on anything that is not a message."""
    return _from_server.decode(frame)
