"""The ways of `afd bench comm` to bounce messages between two processes, one class each.

Both sides open a way at the same time; ``swap`` exchanges addresses between them. ``bounce`` runs
the rounds of one case: side 0 sends ``mine`` and waits for the answer; side 1 waits and answers
with ``mine``. On side 0 it returns the round-trip times in ns, int64 [rounds]; the values of side 1
have no meaning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import shared_memory
from typing import Protocol

import numpy as np
import numpy.typing as npt
import zmq

from afd.errors import AfdError
from afd_comm import (
    Link,
    Message,
    PeerTrace,
    Region,
    Status,
    make_flag,
    memcpy_ping_pong,
    ping_pong,
)

Bytes = npt.NDArray[np.uint8]
Nanoseconds = npt.NDArray[np.int64]
Swap = Callable[[object], object]

TIMEOUT_US = 10_000_000


class Way(Protocol):
    def bounce(self, mine: Bytes, theirs: int, rounds: int) -> Nanoseconds:
        """Runs ``rounds`` rounds. theirs: bytes of the other side's messages."""

    def close(self) -> None: ...


class Memcpy:
    """The lower limit: shared memory, memcpy and a flag, in C++."""

    def __init__(self, side: int, most: int, swap: Swap) -> None:
        self._side, self._swap = side, swap
        if side == 0:
            self._memory = shared_memory.SharedMemory(create=True, size=4096 + 2 * most)
            swap(self._memory.name)
        else:
            self._memory = shared_memory.SharedMemory(name=str(swap(None)))
        assert self._memory.buf is not None
        self._bytes = np.frombuffer(self._memory.buf, np.uint8)

    def bounce(self, mine: Bytes, theirs: int, rounds: int) -> Nanoseconds:
        if self._side == 0:
            self._bytes[:4096] = 0  # clear the flags of the previous case
        self._swap(None)
        times = np.zeros(rounds, np.int64)
        memcpy_ping_pong(self._bytes, mine, self._side == 0, times)
        return times

    def close(self) -> None:
        del self._bytes
        self._memory.close()
        if self._side == 0:
            self._memory.unlink()


class Ours:
    """A backend of afd_comm. python: a Python loop calls post and wait, as the workers do."""

    def __init__(
        self,
        side: int,
        most: int,
        swap: Swap,
        *,
        backend: str,
        spin_us: int | None,
        trace: bool = False,
        python: bool = False,
    ) -> None:
        self._side, self._python = side, python
        self._region = Region(1, most, name=f"bench-{side}", tcp_host="127.0.0.1")
        if spin_us is not None:
            self._region.set_spin_us(spin_us)
        self._trace = PeerTrace() if trace else None
        self._region.trace((0, 1), self._trace)
        addresses = swap(self._region.addresses)
        self._link = Link(
            addresses,  # type: ignore[arg-type]
            backend=backend,
            slots=(0, 1),
            timeout_us=TIMEOUT_US,
            trace=trace,
        )
        self._generation = 0

    def bounce(self, mine: Bytes, theirs: int, rounds: int) -> Nanoseconds:
        self._generation += 1
        times = np.zeros(rounds, np.int64)
        if not self._python:
            ping_pong(self._region, self._link, mine, self._generation, self._side == 0, times)
            return times
        message = Message(0, [(0, mine.ctypes.data, mine.nbytes)])
        for i in range(rounds):
            start = time.perf_counter_ns()
            flag = make_flag(self._generation, i + 1)
            if self._side == 0:
                self._post(message, flag)
            if self._region.wait_all([0], [flag], TIMEOUT_US) != [Status.OK]:
                raise AfdError("the other process of the benchmark ended early; see its message")
            times[i] = time.perf_counter_ns() - start
            if self._side == 1:
                self._post(message, flag)
        return times

    def _post(self, message: Message, flag: int) -> None:
        status = self._link.post(message, flag)
        if status != Status.OK:
            raise AfdError(
                f"sending failed with {status.name}; see the message of the other process"
            )

    def close(self) -> None:
        self._link.close()
        self._region.close()


class ZeroMq:
    """PAIR sockets, without copies, in a Python loop."""

    def __init__(self, side: int, most: int, swap: Swap, *, endpoint: str) -> None:
        self._side = side
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVTIMEO, TIMEOUT_US // 1000)
        if side == 0:
            self._socket.bind(endpoint)
        address = swap(self._socket.getsockopt_string(zmq.LAST_ENDPOINT))
        if side == 1:
            self._socket.connect(str(address))

    def bounce(self, mine: Bytes, theirs: int, rounds: int) -> Nanoseconds:
        times, payload = np.zeros(rounds, np.int64), mine.data
        for i in range(rounds):
            start = time.perf_counter_ns()
            if self._side == 0:
                self._socket.send(payload, copy=False)
            self._socket.recv(copy=False)
            times[i] = time.perf_counter_ns() - start
            if self._side == 1:
                self._socket.send(payload, copy=False)
        return times

    def close(self) -> None:
        self._context.destroy()


def open_way(name: str, side: int, most: int, swap: Swap) -> Way:
    """Opens the way ``name``, one of NAMES. most: bytes of the largest message."""
    if name == "gloo":
        from afd_bench.comm_torch import Gloo

        return Gloo(side, most, swap)
    return _WAYS[name](side, most, swap)


# shm may spin until the answer arrives, because each side has its own core. With tcp the receiver
# thread shares that core, so tcp keeps the library's default.
_SPIN_US = 100_000


_WAYS: dict[str, Callable[[int, int, Swap], Way]] = {
    "memcpy": Memcpy,
    "shm": partial(Ours, backend="shm", spin_us=_SPIN_US),
    "shm, traced": partial(Ours, backend="shm", spin_us=_SPIN_US, trace=True),
    "shm, from Python": partial(Ours, backend="shm", spin_us=_SPIN_US, python=True),
    "tcp": partial(Ours, backend="tcp", spin_us=None),
    "tcp, traced": partial(Ours, backend="tcp", spin_us=None, trace=True),
    "ZeroMQ, ipc": partial(ZeroMq, endpoint=f"ipc://@afd-bench-{os.getpid()}"),
    "ZeroMQ, tcp": partial(ZeroMq, endpoint="tcp://127.0.0.1:*"),
}
NAMES = (*_WAYS, "gloo")
