"""Shared by the control plane's tests: a contract, a clock that moves only on ``sleep``, and a
registry with fake clocks, processes and peers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq

from afd.config.contract import Contract
from afd.control import messages as m
from afd.control.client import ControlClient
from afd.control.depths import FIXED_DEPTH, DepthPolicy
from afd.control.keys import ClientKeys, CurveKeys
from afd.control.messages import Timing
from afd.control.registry import Outgoing, Registry
from afd.control.server import ControlServer
from afd.topology import member_id

CONTRACT = Contract(
    model_hash="c0ffee",
    dtype="bfloat16",
    wire="exact",
    hidden=64,
    num_layers=4,
    moe_layers=(1, 2, 3),
    num_experts=8,
    top_k=2,
    capacity_rows=32,
    max_depth=3,
    attention_instances=2,
    attention_tp=1,
    ffn_instances=2,
    ffn_tp=1,
    elastic=False,
    reduce="exact",
    dispatch="broadcast",
    shared_experts="slices",
    expert_slots=(0, 4, 8),
    expert_map=(tuple(range(8)),) * 3,
    graph_buckets=((1, 2, 4, 8), (4,), (4,)),
)

FAST = Timing(interval_s=0.05, timeout_s=1.0)


KEYS = CurveKeys.generate()
SEAL = bytes(range(32))
MEMBERS = tuple(member_id(r, i) for r in ("attention", "ffn", "gateway") for i in range(4))


def control_server(
    address: str = "tcp://127.0.0.1:0", keys: CurveKeys = KEYS, **options: object
) -> ControlServer:
    """A server that accepts the members of ``keys``."""
    return ControlServer(address, keys, members=MEMBERS, **{"timing": FAST, **options})


def control_client(
    address: str, role: str, index: int, keys: CurveKeys = KEYS, **options: object
) -> ControlClient:
    """A client with the key of its member id."""
    own = keys.member(member_id(role, index))
    options = {"contract": None if role == "gateway" else CONTRACT, "timing": FAST, **options}
    return ControlClient(address, own, role=role, index=index, **options)


@contextlib.contextmanager
def dealer(
    address: str, keys: ClientKeys | None, identity: bytes | None = None
) -> Iterator[zmq.Socket[bytes]]:
    """Connects as a foreign ZeroMQ program. keys: None for a connection without CURVE."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.setsockopt(zmq.LINGER, 0)
        if identity is not None:
            one.setsockopt(zmq.ROUTING_ID, identity)
        if keys is not None:
            one.curve_serverkey = keys.server_public.encode()
            one.curve_publickey = keys.client_public.encode()
            one.curve_secretkey = keys.client_secret.encode()
        one.connect(address)
        yield one


def contract_with(**changes: object) -> Contract:
    return msgspec.structs.replace(CONTRACT, **changes)


class FakeClock:
    """A clock in seconds that advances only in :meth:`sleep`."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def eventually(condition: Callable[[], object], deadline_s: float) -> float:
    """Waits until the condition holds; returns the seconds it took; fails at the deadline."""
    start = time.monotonic()
    while not condition():
        took = time.monotonic() - start
        assert took < deadline_s, f"not within {deadline_s} s"
        time.sleep(0.005)
    return time.monotonic() - start


HERE = "this-host"
NOW_2026 = 1_780_000_000.0


class Deployment:
    """A registry with its clocks, the dead processes, and the messages sent to each peer."""

    def __init__(
        self,
        *,
        expected: Contract | None = None,
        wall: float = NOW_2026,
        depth: DepthPolicy = FIXED_DEPTH,
        attention: int = 0,
        ffn: int = 0,
    ) -> None:
        self.clock = FakeClock()
        self.wall = FakeClock(wall)
        self.dead: set[int] = set()
        self.inbox: dict[bytes, list[m.FromServer]] = {}
        self.registry = Registry(
            timing=m.Timing(interval_s=0.5, timeout_s=3.0),
            expected=expected,
            depth=depth,
            attention=attention,
            ffn=ffn,
            clock=self.clock,
            wall_clock=self.wall,
            seal=SEAL,
            local_pid_space=HERE,
            alive=lambda pid: pid not in self.dead,
        )

    def say(self, peer: bytes, message: m.ToServer) -> m.FromServer:
        """Sends the message as ``peer``; returns the registry's last reply to this peer."""
        self.deliver(self.registry.handle(peer, message))
        return self.inbox[peer][-1]

    def deliver(self, out: Sequence[Outgoing]) -> None:
        for outgoing in out:
            m.decode_from_server(m.encode(outgoing.message))  # every message must be encodable
            self.inbox.setdefault(outgoing.peer, []).append(outgoing.message)

    def hello(self, peer: bytes, role: str, index: int, **changes: object) -> m.FromServer:
        contract = None if role == "gateway" else CONTRACT
        hello = m.Hello(role, index, contract, pid=100, host="h", pid_space=HERE)
        return self.say(peer, msgspec.structs.replace(hello, **changes))

    def join(self, peer: bytes, role: str, index: int, **changes: object) -> m.Welcome:
        answer = self.hello(peer, role, index, **changes)
        assert isinstance(answer, m.Welcome), answer
        return answer

    def refuse(self, peer: bytes, role: str, index: int, **changes: object) -> str:
        answer = self.hello(peer, role, index, **changes)
        assert isinstance(answer, m.Refused), answer
        return answer.reason

    def beat(self, *peers: bytes, state: m.State = "starting") -> None:
        for peer in peers:
            version = self.registry.members.version
            self.deliver(self.registry.handle(peer, m.Heartbeat(state, version)))

    def pass_time(self, seconds: float, *, beating: Sequence[bytes] = ()) -> None:
        """Ticks every 0.25 s, as the server does, while the ``beating`` peers send heartbeats."""
        for _ in range(round(seconds / 0.25)):
            self.clock.sleep(0.25)
            self.wall.sleep(0.25)
            self.beat(*beating)
            self.deliver(self.registry.tick())

    @property
    def ids(self) -> list[str]:
        return [x.id for x in self.registry.members.members]
