"""Rate and latency of one way between two hosts: TCP on one address, or RDMA on one port.

Both hosts open an :class:`End`; one of them sends. The messages are those of a deployment: payload,
header and doorbell, written into the slots of the other host.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from afd.devices import device_named
from afd.errors import AfdError
from afd_comm import Link, Message, Region, Status, VerbsOptions, make_flag, ping_pong
from afd_launch.echo import payload_address

CHUNK = 4 << 20
WINDOW = 4
PING_BYTES = 64
TURNS = 5
_WARM_ROUNDS = 10
_MOST_ROUNDS = 2_000
TIMEOUT_US = 20_000_000


@dataclass(frozen=True)
class Way:
    """How messages travel. backend: tcp or verbs. host: this host's address, for tcp.

    device: where slots and payloads are (a name of :data:`afd.devices.DEVICES`).
    """

    backend: str
    device: str
    host: str | None = None
    verbs: VerbsOptions | None = None


class End:
    """One end: slots that the other end writes, and a link to its slots."""

    def __init__(self, way: Way, swap: Callable[[list[str]], list[str]]) -> None:
        """swap: sends our addresses to the other end, and returns its. Raises CommError."""
        where = device_named(way.device).region_device
        self._region = Region(
            WINDOW, CHUNK, name="doctor", device=where, verbs=way.verbs, tcp_host=way.host
        )
        self._link = Link(
            swap(self._region.addresses),
            backend=way.backend,
            slots=(0, WINDOW),
            timeout_us=TIMEOUT_US,
            device=where,
            verbs=way.verbs,
        )
        self._source = payload_address(self._region)
        self._link.register_memory(self._source, CHUNK, where)
        self._generation = 0

    def send(self, count: int) -> float:
        """Sends ``count`` messages of ``CHUNK`` bytes to an end that receives them.

        Returns: bits per second. Raises AfdError.
        """
        parts = [(0, self._source, CHUNK)]
        messages = [Message(slot, parts) for slot in range(WINDOW)]
        self._generation += 1
        began = time.monotonic()
        for number in range(count):
            if number >= WINDOW:
                self._await(number - WINDOW)
            self._post(messages[number % WINDOW], number)
        for number in range(max(0, count - WINDOW), count):
            self._await(number)
        return count * CHUNK * 8 / (time.monotonic() - began)

    def receive(self, count: int) -> None:
        """Takes the messages of :meth:`send`, and acknowledges each. Raises AfdError."""
        acks = [Message(slot, [(0, self._source, 8)]) for slot in range(WINDOW)]
        self._generation += 1
        for number in range(count):
            self._await(number)
            self._post(acks[number % WINDOW], number)

    def bounce(self, rounds: int, *, starts: bool) -> list[float]:
        """Half the round trips of small messages from host memory, us. The other end bounces too.

        Raises CommError.
        """
        self._generation += 1
        times = np.zeros(rounds, np.int64)
        data = np.ones(PING_BYTES, np.uint8)
        ping_pong(self._region, self._link, data, self._generation, starts, times)
        return [float(t) / 2e3 for t in times]

    def close(self) -> None:
        self._link.close()
        self._region.close()

    def _await(self, number: int) -> None:
        flag = make_flag(self._generation, number + 1)
        _check(self._region.wait_all([number % WINDOW], [flag], TIMEOUT_US)[0])

    def _post(self, message: Message, number: int) -> None:
        _check(self._link.post(message, make_flag(self._generation, number + 1)))


def _check(status: Status) -> None:
    if status != Status.OK:
        raise AfdError(f"a message did not come: {status.name}")


Ask = Callable[[str, int], None]
"""Orders the other end to ``receive``, ``send`` or ``bounce`` so many messages."""


def rates(
    end: End, ask: Ask, answer: Callable[[], float], seconds: float
) -> tuple[list[float], list[float]]:
    """Measures both directions in turns that take about ``seconds`` together.

    answer: the bits per second of the other end's last ``send``.

    Returns: Gb/s of each turn there, and of each turn back. A slow wire has one turn.
    """

    def there(count: int) -> float:
        ask("receive", count)
        return end.send(count)

    def back(count: int) -> float:
        ask("send", count)
        end.receive(count)
        return answer()

    found = []
    for direction in (there, back):
        speed = direction(WINDOW)
        count = round(speed * seconds / (2 * TURNS) / (CHUNK * 8))
        if count == 0:  # one turn takes longer than it should: a slow wire
            found.append([speed / 1e9])
            continue
        found.append([direction(max(WINDOW, count)) / 1e9 for _ in range(TURNS)])
    return found[0], found[1]


def latencies(end: End, ask: Ask, seconds: float) -> list[float]:
    """The median of each turn, us, one way."""

    def bounce(rounds: int) -> float:
        ask("bounce", rounds)
        return median(end.bounce(rounds, starts=True))

    once = bounce(_WARM_ROUNDS)
    rounds = min(_MOST_ROUNDS, max(_WARM_ROUNDS, round(seconds * 1e6 / TURNS / (2 * once))))
    return [bounce(rounds) for _ in range(TURNS)]
