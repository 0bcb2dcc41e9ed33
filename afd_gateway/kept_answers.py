"""Answers that outlive the connection, and the gateway process, that they were begun on.

They lie in memory that all processes of a port share (a memfd), so nothing is left behind and no
disk is waited for. Every process writes to a part of its own and reads all, so that no lock is
needed. Events are written there before the client gets them, so that it never has more than what is
kept, whenever its process is killed. An answer is removed some time after it has ended; if space is
short, those that ended first go first.

A part is a table of names and slots of data. An answer is a chain of slots: its first line is the
head, then come the events, or the whole body. Who goes on with an answer begins a chain of its own;
the newest chain of a name counts. The stream to the lost connection, if it still looks alive, is
left alone.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from afd_gateway.comeback import Wish
from afd_gateway.sse import DONE

ANSWERS_BYTES = 256 * 2**20  # of a port
SLOT = 16 * 2**10  # bytes of data
_HEADER = 64  # bytes: name, padding, and the words below
_NAME = 20
_BEGAN, _NEXT, _LENGTH = 3, 4, 5  # words: when (ns), slot behind this one, bytes of data
_ALIKE = 6  # word: one more than the first slot of another answer in the same place of the table
_WORDS = _HEADER // 8
_NONE = 2**64 - 1  # there is no slot behind


def make_answers(processes: int, size: int = ANSWERS_BYTES) -> int:
    """Returns a descriptor of empty shared memory, for processes that inherit it.

    size: bytes of all answers together, at most; memory is taken when it is used.
    """
    descriptor = os.memfd_create("afd-gateway-answers")
    slots = max(1, size // processes // SLOT)
    os.ftruncate(descriptor, processes * slots * (SLOT + _HEADER + 8))
    return descriptor


@dataclass(frozen=True)
class Head:
    """The head of an answer. streamed: it consists of events."""

    status: int
    headers: tuple[tuple[str, str], ...]
    streamed: bool


@dataclass(frozen=True)
class Kept:
    """What is kept of an answer: the head, and the complete events or the whole body."""

    head: Head
    body: bytes

    @property
    def whole(self) -> bool:
        return not self.head.streamed or self.body.endswith(DONE)


class Answers:
    """The answers that one gateway process keeps. Call it on the event loop.

    Args:
        descriptor: from ``make_answers``.
        process: number of this process among ``processes``.
        keep_s: how long an answer stays after its end.
    """

    def __init__(self, descriptor: int, process: int, processes: int, *, keep_s: float) -> None:
        self._map = mmap.mmap(descriptor, 0)
        self._slots = len(self._map) // processes // (SLOT + _HEADER + 8)
        self._processes = processes
        self._first = process * self._slots
        # The tables of all parts, then all headers, then the data of all slots.
        self._headers_at = processes * self._slots * 8
        self._data_at = self._headers_at + processes * self._slots * _HEADER
        whole = memoryview(self._map)
        self._table = whole[: self._headers_at].cast("Q")
        self._words = whole[self._headers_at : self._data_at].cast("Q")
        self._keep_s = keep_s
        self._free = list(range(self._first, self._first + self._slots))
        self._ended: deque[tuple[float, list[int]]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._inherit()

    @property
    def used(self) -> int:
        """Slots of this process in use."""
        return self._slots - len(self._free)

    def read(self, name: bytes) -> Kept | None:
        """Returns what is kept under a name, by any process."""
        found = max(self._chains(name), default=None)
        if found is None:
            return None
        began, first = found
        data = b"".join(self._data(slot) for slot in self._chain(first))
        if self._name(first) != name or self._words[first * _WORDS + _BEGAN] != began:
            return None  # removed meanwhile
        line, _, body = data.partition(b"\n")
        status, headers, streamed = json.loads(line)
        pairs = tuple((key, value) for key, value in headers)
        if streamed:  # an event may lie in two slots, of which one was written
            body = body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""
        return Kept(Head(status, pairs, streamed), body) if body else None

    def begin(self, name: bytes, head: Head, body: bytes) -> KeptAnswer | None:
        """Keeps the beginning of an answer; None if there is no room."""
        line = json.dumps([head.status, head.headers, head.streamed]).encode() + b"\n"
        made = KeptAnswer(self)
        if not made.add(line + body):
            return None
        first = made.slots[0]
        self._words[first * _WORDS + _BEGAN] = time.monotonic_ns()
        at = self._headers_at + first * _HEADER
        self._map[at : at + _NAME] = name
        self._enter(first)
        return made

    def take(self) -> int | None:
        """Returns an empty slot; None if there is no room."""
        while not self._free and self._ended:
            self.remove(self._ended.popleft()[1])
        if not self._free:
            return None
        slot = self._free.pop()  # the one used last, whose memory is taken already
        self._words[slot * _WORDS + _NEXT] = _NONE
        self._words[slot * _WORDS + _LENGTH] = 0
        return slot

    def append(self, slot: int, data: bytes) -> int:
        """Adds as much of ``data`` as the slot has room for. Returns the number of bytes."""
        word = slot * _WORDS + _LENGTH
        length = self._words[word]
        size = min(len(data), SLOT - length)
        at = self._data_at + slot * SLOT + length
        self._map[at : at + size] = data if size == len(data) else data[:size]
        self._words[word] = length + size  # after the data: a killed process leaves none torn
        return size

    def link(self, slot: int, behind: int) -> None:
        self._words[slot * _WORDS + _NEXT] = behind

    def remove(self, slots: list[int]) -> None:
        first, words = slots[0], self._words
        place = self._first + self._place(self._name(first))
        before, other = -1, self._table[place]
        while other and other != first + 1:
            before, other = other - 1, words[(other - 1) * _WORDS + _ALIKE]
        if other:  # else it has no name yet
            behind = words[first * _WORDS + _ALIKE]
            if before < 0:
                self._table[place] = behind
            else:
                words[before * _WORDS + _ALIKE] = behind
        at = self._headers_at + first * _HEADER
        self._map[at : at + _NAME] = bytes(_NAME)
        self._free += slots

    def end(self, slots: list[int]) -> None:
        """Removes an answer later."""
        loop = asyncio.get_running_loop()
        self._ended.append((loop.time() + self._keep_s, slots))
        if self._timer is None:
            self._timer = loop.call_later(self._keep_s, self._look)

    def close(self) -> None:
        """Ends the timer; the answers stay for the other processes."""
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        while self._ended and self._ended[0][0] <= loop.time():
            self.remove(self._ended.popleft()[1])
        if self._ended:
            self._timer = loop.call_at(self._ended[0][0], self._look)

    def _chains(self, name: bytes) -> Iterator[tuple[int, int]]:
        """Yields (when it began, first slot) of each chain of a name."""
        all_slots = self._processes * self._slots
        for part in range(0, all_slots, self._slots):
            other = self._table[part + self._place(name)]
            for _ in range(self._slots):  # a list that changes meanwhile may end nowhere
                if not 0 < other <= all_slots:
                    break
                slot = other - 1
                if self._name(slot) == name:
                    yield self._words[slot * _WORDS + _BEGAN], slot
                other = self._words[slot * _WORDS + _ALIKE]

    def _place(self, name: bytes) -> int:
        """Returns the place of a name in the table of each part."""
        return int.from_bytes(name[:8], "little") % self._slots

    def _enter(self, first: int) -> None:
        place = self._first + self._place(self._name(first))
        self._words[first * _WORDS + _ALIKE] = self._table[place]
        self._table[place] = first + 1

    def _name(self, slot: int) -> bytes:
        at = self._headers_at + slot * _HEADER
        return self._map[at : at + _NAME]

    def _chain(self, slot: int) -> Iterator[int]:
        for _ in range(self._slots):  # a chain that is removed meanwhile may end nowhere
            yield slot
            slot = self._words[slot * _WORDS + _NEXT]
            if slot >= self._processes * self._slots:
                return

    def _data(self, slot: int) -> bytes:
        at = self._data_at + slot * SLOT
        return self._map[at : at + min(SLOT, self._words[slot * _WORDS + _LENGTH])]

    def _inherit(self) -> None:
        """Takes over the answers of a predecessor that was killed."""
        for place in range(self._first, self._first + self._slots):
            self._table[place] = 0
        for slot in range(self._first, self._first + self._slots):
            if any(self._name(slot)):
                self._enter(slot)
                self.end(list(self._chain(slot)))
        known = {slot for _, slots in self._ended for slot in slots}
        self._free = [slot for slot in self._free if slot not in known]


class KeptAnswer:
    """The chain of one answer that is being given."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.slots: list[int] = []

    def add(self, data: bytes) -> bool:
        """Keeps more of the answer. Returns False, and forgets all of it, if there is no room."""
        slots, answers = self.slots, self._answers
        size = answers.append(slots[-1], data) if slots else 0
        while size < len(data):
            slot = answers.take()
            if slot is None:
                if slots:
                    answers.remove(slots)
                self.slots = []
                return False
            data = data[size:]
            size = answers.append(slot, data)
            if slots:
                answers.link(slots[-1], slot)
            slots.append(slot)
        return True

    def close(self) -> None:
        """The answer has ended. A second call does nothing."""
        if self.slots:
            self._answers.end(self.slots)
            self.slots = []


class Keeper:
    """Keeps the answer to one request. before: what was kept of it when the request came."""

    def __init__(self, answers: Answers, wish: Wish) -> None:
        self._answers = answers
        self.wish = wish
        self.before = answers.read(wish.name)
        self._kept: KeptAnswer | None = None
        self._begun = False

    def stream(self, head: Head, events: bytes) -> None:
        """Keeps complete events. head: of the answer, for the first ones."""
        if self._kept is not None:
            if not self._kept.add(events):
                self._kept = None
        elif not self._begun:
            self._begun = True
            self._kept = self._answers.begin(self.wish.name, head, events)

    def whole(self, head: Head, body: bytes) -> None:
        """Keeps a whole answer that is no stream."""
        self._kept = self._answers.begin(self.wish.name, head, body)
        self.close()

    def close(self) -> None:
        """The answer has ended, or is given up. A second call does nothing."""
        if self._kept is not None:
            self._kept.close()
