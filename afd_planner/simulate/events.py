"""One step as a plain event queue: the reference for :mod:`afd_planner.simulate.step`.

Every message between two instances is an event, so this only suits small cases. It shares the rules
stated in :mod:`afd_planner.simulate.links` with the fast path, but no code. It does not support
deaths of attention instances.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.step import StepInput

Call = tuple[int, int]  # layer, micro-batch


@dataclass
class _Queue:
    """Event queue. Events at the same moment run in the order in which they were added."""

    heap: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    count: itertools.count[int] = field(default_factory=itertools.count)

    def at(self, moment: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (moment, next(self.count), do))

    def run(self) -> None:
        while self.heap:
            moment, _, do = heapq.heappop(self.heap)
            do(moment)


@dataclass
class _SendingLink:
    """A link that sends one burst after the other."""

    queue: _Queue
    busy: bool = False
    waiting: deque[tuple[float, float, list[_ReceivingLink], Call, list[float]]] = field(
        default_factory=deque
    )

    def burst(
        self,
        now: float,
        took: float,
        latency: float,
        to: list[_ReceivingLink],
        call: Call,
        each: list[float],
    ) -> None:
        self.waiting.append((took, latency, to, call, each))
        self._next(now)

    def _next(self, now: float) -> None:
        if self.busy or not self.waiting:
            return
        self.busy = True
        took, latency, to, call, each = self.waiting.popleft()
        for link, carries in zip(to, each, strict=True):
            message = _Message(call, carries, now + took + latency)
            self.queue.at(now + latency, functools.partial(_arrive, link, message))
        self.queue.at(now + took, self._free)

    def _free(self, now: float) -> None:
        self.busy = False
        self._next(now)


@dataclass
class _Message:
    call: Call
    carries: float
    last_byte: float


@dataclass
class _ReceivingLink:
    """A link that receives the messages of one call after the other, in order of arrival."""

    queue: _Queue
    calls: list[Call]
    expected: dict[Call, int]
    complete: Callable[[float, Call], None]
    busy: bool = False
    served: int = 0
    delivered: dict[Call, int] = field(default_factory=dict)
    waiting: dict[Call, deque[_Message]] = field(default_factory=dict)

    def arrive(self, now: float, message: _Message) -> None:
        self.waiting.setdefault(message.call, deque()).append(message)
        self._next(now)

    def _next(self, now: float) -> None:
        if self.busy or not self.calls or not self.waiting.get(self.calls[0]):
            return
        self.busy = True
        message = self.waiting[self.calls[0]].popleft()
        self.queue.at(now + message.carries, lambda t: self._carried(t, message))

    def _carried(self, now: float, message: _Message) -> None:
        self.busy = False
        self.served += 1
        if self.served == self.expected[message.call]:
            self.served = 0
            self.calls.pop(0)
        self.queue.at(max(now, message.last_byte), lambda t: self._deliver(t, message.call))
        self._next(now)

    def _deliver(self, now: float, call: Call) -> None:
        self.delivered[call] = self.delivered.get(call, 0) + 1
        if self.delivered[call] == self.expected[call]:
            self.complete(now, call)


def _arrive(link: _ReceivingLink, message: _Message, now: float) -> None:
    link.arrive(now, message)


class _Instance:
    """Computes its calls in order, each as soon as it is free and the call's input has arrived."""

    def __init__(self, queue: _Queue, calls: list[Call], begin: Callable[[float, Call], None]):
        self._queue = queue
        self._calls = deque(calls)
        self._begin = begin
        self._delivered: set[Call] = set()
        self.busy = False

    def deliver(self, now: float, call: Call) -> None:
        self._delivered.add(call)
        self._start_next(now)

    def _start_next(self, now: float) -> None:
        if not self.busy and self._calls and self._calls[0] in self._delivered:
            self.busy = True
            self._begin(now, self._calls.popleft())

    def free(self, now: float) -> None:
        self.busy = False
        self._start_next(now)


def run_step_events(given: StepInput) -> Array:
    """Returns the moment of the last answer at each attention instance, [x]; see ``run_step``."""
    layers, depth, x = given.attention.shape
    y: int = given.ffn.shape[2]
    queue = _Queue()
    end = np.full(x, -np.inf)
    walk = [(layer, mb) for layer in range(layers) for mb in range(depth)]
    mine = [[c for c in walk if given.rows[c[1], i] > 0] for i in range(x)]
    shared = [c for c in walk if any(c in calls for calls in mine)]
    senders = {c: sum(c in calls for calls in mine) for c in shared}

    a_out = [_SendingLink(queue) for _ in range(x)]
    f_out = [_SendingLink(queue) for _ in range(y)]

    def answered(i: int) -> Callable[[float, Call], None]:
        def complete(now: float, call: Call) -> None:
            layer, mb = call
            end[i] = max(end[i], now)
            attention[i].deliver(now, (layer + 1, mb))

        return complete

    def attend(i: int) -> Callable[[float, Call], None]:
        def begin(now: float, call: Call) -> None:
            layer, mb = call
            queue.at(now + given.attention[layer, mb, i], lambda t: attended(t, call))

        def attended(now: float, call: Call) -> None:
            layer, mb = call
            each = [given.out_each[mb, i]] * y
            took, latency = given.out_burst[layer, mb, i], given.out_latency[layer, mb, i]
            a_out[i].burst(now, took, latency, f_in, call, each)
            attention[i].free(now)

        return begin

    def work(j: int) -> Callable[[float, Call], None]:
        outages = sorted((o for o in given.outages if o.ffn == j), key=lambda o: o.start)

        def begin(now: float, call: Call) -> None:
            layer, mb = call
            took = given.ffn[layer, mb, j]
            for outage in outages:
                if now < outage.end and now + took > outage.start:
                    now = outage.end + outage.resend
            queue.at(now + took, lambda t: worked(t, call))

        def worked(now: float, call: Call) -> None:
            layer, mb = call
            to = [i for i in range(x) if call in mine[i]]
            each = [given.back_each[mb, i] for i in to]
            took, latency = given.back_burst[layer, mb, j], given.back_latency[layer, mb, j]
            f_out[j].burst(now, took, latency, [a_in[i] for i in to], call, each)
            ffn[j].free(now)

        return begin

    attention = [_Instance(queue, mine[i], attend(i)) for i in range(x)]
    ffn = [_Instance(queue, shared, work(j)) for j in range(y)]
    a_in = [
        _ReceivingLink(queue, list(mine[i]), dict.fromkeys(mine[i], y), answered(i))
        for i in range(x)
    ]
    for instance in ffn:
        instance.busy = True
        queue.at(given.ffn_from, instance.free)
    f_in = [_ReceivingLink(queue, list(shared), senders, ffn[j].deliver) for j in range(y)]
    for i in range(x):
        for call in mine[i]:
            if call[0] == 0:
                queue.at(given.start[i], functools.partial(attention[i].deliver, call=call))
    queue.run()
    return end
