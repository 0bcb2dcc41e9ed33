"""afd_comm traces: message times on one clock and on two clocks."""

from __future__ import annotations

import random
import socket
import struct
import time

import numpy as np
import pytest
from comm_peer import TIMEOUT_US
from comm_wire import frame, hello, raw, tcp_address

from afd_comm import CommError, Header, Link, Message, PeerTrace, Region, Status, make_flag

DATA = np.arange(64, dtype=np.uint8)


def post(link: Link, seq: int, answer_to: Header | None = None) -> int:
    part = (0, DATA.ctypes.data, DATA.nbytes)
    flag = make_flag(1, seq)
    assert link.post(Message(0, [part]), flag, answer_to) == Status.OK
    return flag


def arrival(region: Region, flag: int, slot: int = 0) -> Header:
    assert region.wait_all([slot], [flag], TIMEOUT_US) == [Status.OK]
    return region.header(slot)


class Pair:
    """Two regions with one traced link in each direction."""

    def __init__(self, backend: str) -> None:
        self.near, self.far = (Region(1, 64, name=n, tcp_host="127.0.0.1") for n in ("n", "f"))
        self.trace = PeerTrace()
        self.near.trace((0, 1), self.trace)
        there, back = self.far.addresses, self.near.addresses
        self.ask = Link(there, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US, trace=True)
        self.answer = Link(back, backend=backend, slots=(0, 1), timeout_us=TIMEOUT_US, trace=True)

    def round(self, seq: int, held_s: float = 0.0) -> tuple[Header, Header]:
        request = arrival(self.far, post(self.ask, seq))
        time.sleep(held_s)
        return request, arrival(self.near, post(self.answer, seq, request))


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_histograms_hold_what_the_headers_say(backend: str) -> None:
    pair = Pair(backend)
    rounds = [pair.round(seq) for seq in range(1, 301)]
    trip = [(a.t_arrived - q.t_posted) - (a.t_posted - q.t_arrived) for q, a in rounds]
    expected = {
        "inbound": [a.t_arrived - a.t_posted for _, a in rounds],
        "outbound": [q.t_arrived - q.t_posted for q, _ in rounds],
        "round_trip": trip,
        "waiting": [a.t_consumed - a.t_arrived for _, a in rounds],
    }
    for name, values in expected.items():
        histogram = getattr(pair.trace, name)
        assert histogram.count == len(values)
        assert histogram.total_ns == sum(values)
        assert histogram.max_ns == max(values)
        for fraction in (0.01, 0.5, 0.9, 0.99, 1.0):
            wanted = sorted(values)[max(0, int(np.ceil(fraction * len(values))) - 1)]
            assert histogram.quantile_ns(fraction) == pytest.approx(wanted, rel=1 / 16, abs=1)
        bounds = [256 << power for power in range(20)]
        exact = [sum(v < bound for v in values) for bound in bounds]
        # These bounds are bucket edges, so the counts are exact.
        assert histogram.cumulative(bounds) == exact
    assert pair.trace.offset_ns == 0 and pair.trace.offset_error_ns == 0


def test_times_match_the_system_clock() -> None:
    """Also holds after a thread's first 50 ms, when times come from the CPU's counter."""
    pair = Pair("shm")
    seq, last, end = 0, 0, time.monotonic() + 0.3
    while time.monotonic() < end:
        seq += 1
        before = time.monotonic_ns()
        flag = post(pair.ask, seq)
        posted = pair.far.header(0).t_posted
        assert pair.far.ready(0, flag)
        assert before - 1000 <= posted <= time.monotonic_ns() + 1000
        assert posted >= last
        last = posted
        if seq % 500 == 0:
            time.sleep(0.003)  # longer than one calibration against the clock stays valid
    assert seq > 500


def test_round_trip_excludes_the_time_until_the_answer() -> None:
    pair = Pair("shm")
    pair.round(1, held_s=0.05)
    assert pair.trace.round_trip.count == 1
    assert pair.trace.round_trip.max_ns < 10_000_000


def test_nothing_is_recorded_if_one_end_has_tracing_off() -> None:
    pair = Pair("shm")
    pair.answer.trace = False
    _, answer = pair.round(1)
    times = (answer.t_posted, answer.t_sent, answer.t_arrived, answer.t_consumed)
    assert times == (0, 0, 0, 0) and pair.trace.inbound.count == 0
    pair.answer.trace = True
    pair.ask.trace = False
    pair.round(2)
    assert pair.trace.inbound.count == 1 and pair.trace.round_trip.count == 0
    pair.near.trace((0, 1), None)
    pair.round(3)
    assert pair.trace.inbound.count == 1
    with pytest.raises(CommError, match="cannot be traced"):
        pair.near.trace((0, 2), pair.trace)


def test_a_message_that_several_waits_see_counts_once() -> None:
    pair = Pair("shm")
    flag = post(pair.answer, 1)
    for _ in range(3):
        arrival(pair.near, flag)
        assert pair.near.wait_any([0], [flag], 0) == 0
    assert pair.trace.waiting.count == 1


# -- a peer with another clock, simulated through a socket


def ask_and_answer(
    region: Region, s: socket.socket, seq: int, offset: int, way_ns: int, hold_ns: int
) -> None:
    """Simulates a peer that receives our request ``way_ns`` after the post, holds it for at least
    ``hold_ns``, then answers. Its clock is ``offset`` ns ahead."""
    asked = time.monotonic_ns()
    arrived = asked + way_ns + offset
    time.sleep((way_ns + hold_ns) / 1e9)
    answered = time.monotonic_ns() + offset
    # Time beyond way_ns counts as holding time, also where the sleep took longer than requested.
    times = struct.pack("<6qQq", answered, answered, 0, 0, asked, arrived, 12345, 0)
    flag = make_flag(1, seq)
    s.sendall(frame(flag=flag, traced=1, times=times, sequence=seq) + b"abcdefgh")
    arrival(region, make_flag(1, seq), slot=1)


@pytest.mark.parametrize("offset", [0, 7_000_000_000, -(10**15)])
def test_offset_of_another_clock_within_its_error_bound(offset: int) -> None:
    rng = random.Random(offset)
    region = Region(3, 4096, name="two clocks", tcp_host="127.0.0.1")
    trace = PeerTrace()
    region.trace((1, 1), trace)
    with raw(region, hello(region)) as s:
        assert trace.offset_error_ns == -1
        for seq in range(1, 41):
            way = rng.randrange(10_000, 3_000_000)
            ask_and_answer(region, s, seq, offset, way, rng.randrange(0, 200_000))
            assert abs(trace.offset_ns - offset) <= trace.offset_error_ns
    assert 0 < trace.offset_error_ns < 2_000_000  # bounded by the fastest of the 40 requests
    assert trace.round_trip.count == trace.inbound.count == trace.outbound.count == 40
    assert trace.inbound.max_ns < 100_000_000


def test_false_times_are_harmless() -> None:
    """A peer may send any 64 bytes as times."""
    rng = random.Random(9)
    region = Region(3, 4096, name="lies", tcp_host="127.0.0.1")
    trace = PeerTrace()
    region.trace((0, 3), trace)
    with raw(region, hello(region)) as s:
        for seq in range(1, 301):
            extremes = (0, 1, -1, 2**63 - 1, -(2**63), rng.randrange(2**63))
            times = struct.pack("<8q", *(rng.choice(extremes) for _ in range(8)))
            traced = rng.choice((1, -5))
            s.sendall(frame(flag=make_flag(1, seq), traced=traced, times=times, sequence=seq))
            s.sendall(b"abcdefgh")
            arrival(region, make_flag(1, seq), slot=1)
    assert trace.waiting.count == 300
    assert tcp_address(region)
