"""All messages of the control plane: frozen structs in one tagged union, encoded as msgpack.

A member sends ``Hello``, ``Heartbeat``, ``Bye``, and ``SetSeat`` for its own seat; an operator
sends ``Status``, ``SetDepth``, ``Drain``, ``SetSeat``, ``MoveExperts``, ``AskContract``,
``Shutdown``; the supervisor of a host has the operator's keys and also sends ``HostReport``. The
server replies with ``Welcome``, ``Wait``, ``Refused``, ``Unknown``, ``Beat``, ``Members``,
``Agreement``, ``Hosts`` and ``Closing``. Every message is one ZeroMQ frame. Decoding checks types,
ranges and lengths.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from afd.config.contract import Contract
from afd.errors import ConfigError
from afd.topology import member_id

PROTOCOL = 7
"""Incremented when a message changes its meaning; members of another protocol are refused."""
MAX_MESSAGE_BYTES = 1 << 20
"""Both ends drop a connection that sends a larger message."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Generation = Annotated[int, Meta(ge=0, le=2**32 - 1)]
Small = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Text = Annotated[str, Meta(max_length=4096)]
Addresses = Annotated[tuple[Text, ...], Meta(max_length=64)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]

State: TypeAlias = Literal["starting", "ready", "draining"]
STATES: tuple[State, ...] = ("starting", "ready", "draining")
"""The states of a member, in order; it never goes back."""

CONTRACT_ROLES = ("attention", "ffn")
ROLES = (*CONTRACT_ROLES, "gateway")


class Timing(msgspec.Struct, frozen=True):
    """Seconds between two heartbeats, and seconds of silence after which a member is dropped."""

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
    """One registered process.

    addresses: of its Region (see afd_comm). order_addresses: of the Region in which an FFN rank
    receives orders. Both hold the tokens with which a peer may claim slots, so only attention and
    FFN members get them; for others they are empty.
    """

    role: Text
    index: Small
    generation: Generation
    rank: Small = 0
    addresses: Addresses = ()
    order_addresses: Addresses = ()
    api_url: Text = ""
    metrics_url: Text = ""
    pid: Small = 0
    state: State = "starting"
    host: Text = ""
    pid_space: Text = ""  # where `pid` is valid, see hosts.pid_space()

    @property
    def id(self) -> str:
        return member_id(self.role, self.index, self.rank)


class Move(msgspec.Struct, frozen=True):
    """One layer whose experts are not where they were at the start: the expert in every slot, and
    the bank that holds them (see :mod:`afd.control.moves`)."""

    layer: Small
    bank: Small
    experts: tuple[Small, ...]


Wish: TypeAlias = Literal["run", "drain", "restart", "remove"]


class Seat(msgspec.Struct, frozen=True):
    """What operators want of one member (:mod:`afd.control.seats`).

    wish: run; drain: it finishes its requests and gets no new ones (an FFN instance: no experts);
    restart, remove: so, and then its process ends. generation: the wish ends with this generation;
    0: it stays.
    """

    id: Text
    wish: Wish = "run"
    generation: Generation = 0


class Members(msgspec.Struct, frozen=True, tag="members"):
    """The whole deployment as one immutable snapshot; ``version`` grows with every change.

    depth: the operator's runtime depth (None: as configured; AUTO of afd/depth.py: by ``depths``).
    depths: (bucket, depth) of decode steps, chosen from measured step times. Members are sorted by
    role, index and rank.

    moved: layers whose experts are not where the contract has them. moving: the current move, which
    is number ``moves`` of all so far; attention instances follow it once ``switching``. moves_left:
    number of moves that are not finished. move_fault: why the last ones were cancelled.

    seats: every attention and FFN instance that is wanted or still runs, by role and index, and
    single FFN ranks that are to restart.

    seal: proves to a restarted server that an earlier run of it made this snapshot.
    """

    version: Count = 0
    members: Annotated[tuple[Member, ...], Meta(max_length=65536)] = ()
    depth: Small | None = None
    depths: tuple[tuple[Small, Small], ...] = ()
    draining: bool = False
    moved: tuple[Move, ...] = ()
    moving: Move | None = None
    switching: bool = False
    moves: Count = 0
    moves_left: Count = 0
    move_fault: Text = ""
    seats: Annotated[tuple[Seat, ...], Meta(max_length=65536)] = ()
    seal: Annotated[bytes, Meta(max_length=64)] = b""

    def find(self, role: str, index: int, rank: int = 0) -> Member | None:
        """The member, or None while it is not registered."""
        wanted = (role, index, rank)
        return next((m for m in self.members if (m.role, m.index, m.rank) == wanted), None)

    def seat(self, member: str) -> Seat | None:
        """The seat of a member id; None: no process is wanted there, or nothing of a rank."""
        return next((seat for seat in self.seats if seat.id == member), None)

    def of(self, role: str, *, state: State | None = None) -> tuple[Member, ...]:
        """The members of a role (in one state, if given), by index and rank."""
        return tuple(m for m in self.members if m.role == role and state in (None, m.state))


# --- member -> server -------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Asks to become a member. It is idempotent: a member repeats it until it gets a reply.

    generation: 0 at the first join. A member that was welcomed before sends its generation, the
    ``incarnation`` of the server that assigned it and its last snapshot. A restarted server
    rebuilds its registry from them, if the snapshot's seal is right.
    """

    role: Text
    index: Small
    contract: Contract | None
    rank: Small = 0
    addresses: Addresses = ()
    order_addresses: Addresses = ()
    api_url: Text = ""
    metrics_url: Text = ""
    pid: Small = 0
    host: Text = ""
    pid_space: Text = ""
    state: State = "starting"
    generation: Generation = 0
    incarnation: Count = 0
    known: Members | None = None
    protocol: Small = PROTOCOL


class BucketSteps(msgspec.Struct, frozen=True):
    """Number of decode steps of up to ``rows`` rows at one depth, and the time from the start of
    each to the start of the next (see afd/metrics/decode_steps.py)."""

    rows: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    depth: Annotated[int, Meta(ge=0, le=1024)]
    steps: Count
    seconds: Seconds


class Work(msgspec.Struct, frozen=True):
    """Totals of a member since its start: seconds of its own stage, seconds of waiting for the
    other side inside steps, and on attention instances the decode steps."""

    busy_s: Seconds = 0.0
    waited_s: Seconds = 0.0
    steps: Annotated[tuple[BucketSteps, ...], Meta(max_length=1024)] = ()


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """A member's sign of life. It carries the state and the known version, so that a lost message
    is made up for at the next heartbeat.

    moves: number of the last expert move that it has made. move_fault: why it cannot make the
    current one, if it cannot.
    """

    state: State
    version: Count
    moves: Count = 0
    move_fault: Text = ""
    work: Work = Work()


class Bye(msgspec.Struct, frozen=True, tag="bye"):
    """The member leaves. The reply is Beat, after which the member can close."""


# --- operator -> server -----------------------------------------------------------------------


class Status(msgspec.Struct, frozen=True, tag="status"):
    """Asks for Members."""


class AskContract(msgspec.Struct, frozen=True, tag="ask_contract"):
    """Asks for Agreement."""


class SetDepth(msgspec.Struct, frozen=True, tag="set_depth"):
    """Sets the runtime depth (None: as configured; AUTO of afd/depth.py: chosen from measured step
    times). The reply is Members."""

    depth: Small | None


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Starts or ends draining: running requests finish, gateways refuse new ones, and only a role
    that was a member may join. The reply is Members."""

    on: bool = True


class SetSeat(msgspec.Struct, frozen=True, tag="set_seat"):
    """Sets the wish for one member. The reply is Members.

    id: "attention-1"; "attention" or "ffn" with wish run: the first free seat. once: the wish ends
    with the process that runs now. A member may only send this for itself, with drain and once: its
    process got SIGTERM.
    """

    id: Text
    wish: Wish
    once: bool = False


class MoveExperts(msgspec.Struct, frozen=True, tag="move_experts"):
    """Moves the experts while the deployment serves: the expert in every slot, for every MoE layer
    (afd/placement/tables.py). The reply is Members."""

    tables: tuple[tuple[Small, ...], ...]


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Ends the deployment: members are told to stop, then the server stops."""


class Rail(msgspec.Struct, frozen=True):
    """One RDMA port of a host. link: "InfiniBand" or "Ethernet". gid: kind of its address, such as
    "RoCE v2". mtu: bytes, of its network interface; 0 if it has none."""

    port: Text
    link: Text
    gid: Text
    mtu: Small


class HostReport(msgspec.Struct, frozen=True, tag="host_report"):
    """What the supervisor of a host says of it, once a second. The reply is Hosts.

    process: a random id of the supervisor. machine, pid: where it runs. settings: JSON, see
    :func:`afd_launch.host_view.settings_of`. rails: its RDMA ports, in rail order. fault: why it
    cannot take part.
    """

    name: Text
    process: Text
    machine: Text
    pid: Small
    versions: Annotated[dict[Text, Text], Meta(max_length=16)]
    settings: Annotated[str, Meta(max_length=1 << 18)]
    rails: Annotated[tuple[Rail, ...], Meta(max_length=64)] = ()
    fault: Text = ""


# --- server -> member or operator -------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The reply to an accepted Hello. incarnation: identifies this run of the server."""

    generation: Generation
    incarnation: Count
    members: Members
    timing: Timing


class Wait(msgspec.Struct, frozen=True, tag="wait"):
    """Try again: another process holds the id, and whether it lives is not known yet."""

    reason: str


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """A final refusal. reason: cause and remedy, for the user."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag="unknown"):
    """The server does not know the sender (it restarted or dropped it): send Hello again."""


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """The server's sign of life."""


class Agreement(msgspec.Struct, frozen=True, tag="agreement"):
    """The contract that all members share; None while no member has one."""

    contract: Contract | None


class HostState(msgspec.Struct, frozen=True):
    """Whether a host takes part now; fault: why it does not, if that is known."""

    name: Text
    present: bool = False
    fault: Text = ""


class Hosts(msgspec.Struct, frozen=True, tag="hosts"):
    """All hosts of the deployment file. clock: of the control plane, seconds since 1970.
    objection: why the host that asks must not take part; "" if it may."""

    clock: float
    hosts: tuple[HostState, ...]
    objection: str = ""


class Closing(msgspec.Struct, frozen=True, tag="closing"):
    """The server stops; ``stop_members``: the operator ended the whole deployment."""

    stop_members: bool = False


FromMember: TypeAlias = Hello | Heartbeat | Bye
FromOperator: TypeAlias = (
    Status | AskContract | SetDepth | Drain | SetSeat | MoveExperts | Shutdown | HostReport
)
ToServer: TypeAlias = FromMember | FromOperator
FromServer: TypeAlias = (
    Welcome | Wait | Refused | Unknown | Beat | Members | Agreement | Hosts | Closing
)

_T = TypeVar("_T")
_encoder = msgspec.msgpack.Encoder()
_to_server: msgspec.msgpack.Decoder[ToServer] = msgspec.msgpack.Decoder(ToServer)
_from_server: msgspec.msgpack.Decoder[FromServer] = msgspec.msgpack.Decoder(FromServer)


class Malformed(Exception):
    """The bytes are not a message of this protocol."""


def encode(message: ToServer | FromServer) -> bytes:
    return _encoder.encode(message)


def decode_to_server(frame: bytes) -> ToServer:
    """Decodes a message of a member or an operator. Raises Malformed."""
    return _decode(_to_server, frame)


def decode_from_server(frame: bytes) -> FromServer:
    """Decodes a message of the server. Raises Malformed."""
    return _decode(_from_server, frame)


def _decode(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        # ValueError: invalid UTF-8. RecursionError: deep nesting.
        raise Malformed(f"{type(error).__name__}: {error}"[:200]) from None
