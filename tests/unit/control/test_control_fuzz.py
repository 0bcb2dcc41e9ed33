"""No message may end the control plane: fuzzes the server's message handling, with a seed.

AFD_FUZZ_INPUTS sets the number of inputs, AFD_FUZZ_SEED the seed. A failure prints both.
"""

from __future__ import annotations

import os
import random
from typing import Any

import msgspec
import pytest
from control_support import CONTRACT, MEMBERS, Deployment, control_server

from afd.control import messages as m
from afd.control.authority import OPERATOR
from afd.control.generations import MAX_GENERATION
from afd.control.refusals import Refusals
from afd.control.server import ControlServer
from afd.topology import member_id

INPUTS = int(os.environ.get("AFD_FUZZ_INPUTS", "20000"))
SEED = int(os.environ.get("AFD_FUZZ_SEED", "1"))

INVALID_UTF8 = m.encode(m.Hello("ffn", 0, None)).replace(b"\xa3ffn", b"\xa3f\xffn")
DEEP = b"\x82\xa4type\xa5hello\xa1x" + b"\x91" * 100_000

NUMBERS = (0, 1, -1, 2, 7, 31, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53,
           2**63 - 1, -(2**31), -(2**63), 2**64 - 1)  # fmt: skip
FLOATS = (0.0, -0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan"), 0.25)
TEXTS = ("", "ffn", "attention", "gateway", "ready", "draining", "x" * 5000, "\0", "é", "hello",
         "heartbeat", "bye", "set_depth", "move_experts", "shutdown")  # fmt: skip


def seeds(deployment: Deployment) -> list[bytes]:
    """Returns one message of every type with all fields filled, and inputs that failed before."""
    a = deployment.join(b"a", "attention", 0, addresses=("a",))
    table = tuple(reversed(range(8)))
    known = msgspec.structs.replace(
        deployment.registry.members,
        depths=((8, 2),),
        moved=(m.Move(1, 1, table),),
        moving=m.Move(2, 1, table),
        moves=2,
    )
    hello = m.Hello(
        "ffn", 1, CONTRACT, addresses=("f",), order_addresses=("o",), pid=9, host="h",
        generation=a.generation, incarnation=1, known=known,
    )  # fmt: skip
    steps = (m.BucketSteps(8, 2, 100, 1.5), m.BucketSteps(16, 1, 5, 0.1))
    beat = m.Heartbeat("ready", 3, 1, "fault", m.Work(1.0, 2.0, steps))
    messages: list[m.ToServer] = [
        hello, m.Hello("gateway", 0, None), m.Hello("attention", 1, CONTRACT), beat,
        m.Heartbeat("draining", 0), m.Bye(), m.Status(), m.AskContract(), m.SetDepth(2),
        m.SetDepth(None), m.Drain(), m.Drain(False), m.MoveExperts((table,) * 3),
    ]  # fmt: skip
    return [INVALID_UTF8, DEEP[:3000], *map(m.encode, messages)]


class Mutator:
    """Makes inputs from a corpus: changes random bytes, or values inside a valid encoding."""

    def __init__(self, draw: random.Random, corpus: list[bytes]) -> None:
        self._draw = draw
        self._corpus = corpus

    def input(self) -> bytes:
        seed = self._draw.choice(self._corpus)
        how = self._draw.random()
        if how < 0.1:
            return seed  # unchanged, like a repeated message
        if how < 0.5:
            try:
                return msgspec.msgpack.encode(self._value(msgspec.msgpack.decode(seed), 0))
            except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
                pass
        return self._bytes(bytearray(seed))

    def _value(self, value: Any, depth: int) -> Any:
        """Returns the value with some part of it replaced."""
        draw = self._draw
        if draw.random() < 0.08 and depth:
            return draw.choice(
                (None, True, draw.choice(NUMBERS), draw.choice(FLOATS), draw.choice(TEXTS), [], {},
                 [value] * draw.randrange(4), b"\xff" * 8)
            )  # fmt: skip
        match value:
            case bool() | None | bytes():
                return value
            case int():
                return draw.choice(NUMBERS) if draw.random() < 0.1 else value
            case float():
                return draw.choice(FLOATS) if draw.random() < 0.2 else value
            case str():
                return draw.choice(TEXTS) if draw.random() < 0.05 else value
            case list():
                return [self._value(x, depth + 1) for x in value]
            case dict():
                kept = [k for k in value if draw.random() > 0.03]
                return {k: self._value(value[k], depth + 1) for k in kept}
        raise AssertionError(type(value))

    def _bytes(self, data: bytearray) -> bytes:
        draw = self._draw
        for _ in range(draw.choice((1, 1, 1, 2, 4, 16))):
            at = draw.randrange(len(data) + 1)
            match draw.randrange(6):
                case 0 if data:
                    data[at % len(data)] ^= 1 << draw.randrange(8)
                case 1 if data:
                    data[at % len(data)] = draw.choice(
                        b"\x00\x7f\x80\x90\xc0\xc1\xc6\xcb\xdb\xdd\xdf\xff"
                    )
                case 2:
                    del data[at:]
                case 3:
                    data[at:at] = data[draw.randrange(len(data) + 1) :][:64]
                case 4:
                    data[at:at] = draw.choice(self._corpus)[:200]
                case _:
                    data[at:at] = draw.randbytes(draw.randrange(1, 9))
        return bytes(data)


def _fitting(server: ControlServer, peer: bytes, payload: bytes) -> str | None:
    """Returns the sender allowed to send this message, so that it is not refused for its key."""
    try:
        message = m.decode_to_server(payload)
    except m.Malformed:
        return server.registry.holder(peer)
    if isinstance(message, m.Hello):
        return member_id(message.role, message.index, message.rank)
    return server.registry.holder(peer) if isinstance(message, m.FromMember) else OPERATOR


def fuzz(server: ControlServer, inputs: int, seed: int) -> list[BaseException]:
    """Returns exceptions that reached the server's last guard; the list should be empty."""
    draw = random.Random(seed)
    deployment = Deployment(expected=CONTRACT if seed % 2 else None)
    mutator = Mutator(draw, seeds(deployment))
    senders = [*MEMBERS, OPERATOR, None]
    caught: list[BaseException] = []

    class Quiet(Refusals):
        def note(self, text: str, error: BaseException | None = None) -> None:
            self.count += 1
            caught.extend([error] if error is not None else [])

    server.registry, server.refusals = deployment.registry, Quiet()
    for number in range(inputs):
        peer = b"peer-%d" % draw.randrange(8)
        payload = mutator.input()
        sender = draw.choice(senders) if draw.random() < 0.2 else _fitting(server, peer, payload)
        for reply in server.replies(peer, sender, payload):
            assert m.decode_from_server(m.encode(reply.message))
        if number % 50 == 0:
            deployment.pass_time(0.25)
        server.registry.stopping = False
    return caught


def test_no_message_ends_the_control_plane() -> None:
    with control_server() as server:
        server.close()
        caught = fuzz(server, INPUTS, SEED)
        print(
            f"{INPUTS} inputs, seed {SEED}: {server.refusals.count} refused, "
            f"{server.registry.members.version} changes of the snapshot"
        )
        assert caught == []
        assert server.refusals.count > INPUTS / 10
        registry = server.registry
        assert len(registry.members.members) <= len(MEMBERS)
        assert all(0 < x.generation < MAX_GENERATION / 2 for x in registry.members.members)
        # The server still accepts members.
        welcome = server.replies(b"new", "gateway-0", m.encode(m.Hello("gateway", 0, None)))
        assert isinstance(welcome[0].message, (m.Welcome, m.Wait))


@pytest.mark.parametrize("frame", [INVALID_UTF8, DEEP, b"", b"\xdf\xff\xff\xff\xff\xa4type"])
def test_inputs_that_failed_before_are_refused(frame: bytes) -> None:
    with control_server() as server:
        (reply,) = server.replies(b"x", "ffn-0", frame)
        assert isinstance(reply.message, m.Refused) and server.refusals.count == 1


def test_an_error_in_the_handling_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    with control_server() as server:
        monkeypatch.setattr(server.registry, "handle", lambda *_: 1 / 0)
        (reply,) = server.replies(b"x", OPERATOR, m.encode(m.Status()))
        assert isinstance(reply.message, m.Refused) and server.refusals.count == 1
