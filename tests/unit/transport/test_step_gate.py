"""StepGate: a stream that waits for one word per position, with peers of every backend.

The reference accelerator's stream is the calling thread.
"""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
from comm_peer import TIMEOUT_US

from afd_comm import CommError, Link, Message, Region, Status, StepGate, StepPlan, make_flag

LANES, ITEM, STRIDE = 3, 24, 4
LATE_US = 300_000


class Peer:
    """A sender of requests, which are its number and the position's, and receiver of answers."""

    def __init__(self, index: int, session: int, region: Region) -> None:
        self.index, self.session = index, session
        self.answers = Region(LANES, STRIDE * ITEM, name=f"peer-{index}", tcp_host="127.0.0.1")
        self.link = Link(
            region.addresses, slots=(index * LANES, LANES), timeout_us=TIMEOUT_US, backend="shm"
        )
        self.first_flag = make_flag(session, 0x8000_0001)

    def post(self, lane: int, turn: int, depth: int) -> int:
        """Posts the request of a position; returns its flag."""
        flag = self.first_flag + turn * depth + lane
        data = np.array([self.index, turn], np.int64)
        message = Message(self.index * LANES + lane, [(0, data.ctypes.data, data.nbytes)])
        assert self.link.post(message, flag) == Status.OK
        return flag

    def run(self, layers: int, depth: int, rows: list[int], until: int | None = None) -> None:
        """Runs a step; checks every answer. until: number of requests after which it stops."""
        sent: dict[int, int] = {}
        for number in range(layers * depth):
            turn, lane = divmod(number, depth)
            if lane in sent:
                self.check(lane, sent.pop(lane), turn - 1, rows)
            if number == until:
                return
            sent[lane] = self.post(lane, turn, depth)
        for lane, flag in sent.items():
            self.check(lane, flag, layers - 1, rows)

    def check(self, lane: int, flag: int, turn: int, rows: list[int]) -> None:
        assert self.answers.wait_all([lane], [flag], TIMEOUT_US) == [Status.OK]
        header, count = self.answers.header(lane), rows[lane]
        assert (header.count, header.user[0]) == (count, turn)
        got = self.answers.buffer(lane)[: count * ITEM].view(np.int64).reshape(count, 3)
        assert (got[:, 0] == self.index).all() and (got[:, 1] == turn).all()
        assert got[:, 2].tolist() == list(range(count))
        self.answers.reset([lane])  # with one layer, the next answer has the same flag


class Side:
    """The receiver: its region, its gate, and a stream that answers."""

    def __init__(self, backends: list[str]) -> None:
        count = len(backends)
        self.region = Region(count * LANES, 16, name="gate")
        self.gate = StepGate(self.region, peers=count, lanes=LANES)
        self.peers = [Peer(i, 5 + i, self.region) for i in range(count)]
        for peer, backend in zip(self.peers, backends, strict=True):
            link = Link(
                peer.answers.addresses, slots=(0, LANES), timeout_us=TIMEOUT_US, backend=backend
            )
            self.gate.set_peer(
                peer.index, link, first_slot=peer.index * LANES, first_flag=peer.first_flag
            )
        self.memory = np.zeros((LANES, count * STRIDE, 3), np.int64)

    def plan(self, layers: int, depth: int) -> StepPlan:
        positions = [
            (lane, Message(lane, [(0, self.memory[lane].ctypes.data, ITEM)], bytes([turn])))
            for turn in range(layers)
            for lane in range(depth)
        ]
        return StepPlan(positions, lanes=depth, stride=STRIDE)

    def step(
        self, layers: int, depths: list[int], rows: list[list[int]], late_us: int = LATE_US
    ) -> list[Status]:
        depth = max(depths)
        self.gate.begin(
            self.plan(layers, depth), np.array(depths, np.int32), np.array(rows, np.int32), late_us
        )
        for number in range(layers * depth):
            lane = number % depth
            self.gate.enqueue_wait(0, lane, number + 1)
            for i in range(len(self.peers)):
                mine = self.memory[lane, i * STRIDE : (i + 1) * STRIDE]
                mine[:, 0], mine[:, 1], mine[:, 2] = self.request(i, lane, depths)
            self.gate.enqueue_ticket(0, lane, number + 1)
        failed = self.gate.wait(0)
        return [failed.get(i, Status.OK) for i in range(len(self.peers))]

    def request(self, i: int, lane: int, depths: list[int]) -> tuple[int, int, np.ndarray]:
        items = np.arange(STRIDE)
        if lane >= depths[i]:
            return -1, -1, items
        index, sent = self.region.buffer(i * LANES + lane).view(np.int64).tolist()
        return index, sent, items


def begin(work: list[tuple[Peer, tuple[object, ...]]]) -> list[Future[None]]:
    """Runs the peers' sides of a step, each on a thread of its own."""
    pool = ThreadPoolExecutor(len(work))
    running = [pool.submit(peer.run, *arguments) for peer, arguments in work]  # type: ignore[arg-type]
    pool.shutdown(wait=False)
    return running


def end(running: list[Future[None]]) -> None:
    for peer in running:
        peer.result(20)


@pytest.mark.parametrize("layers", [1, 4])
def test_random_members_rows_and_depths(layers: int) -> None:
    rng = random.Random(layers)
    side = Side(["ipc", "shm", "tcp", "ipc", "tcp"])
    for _ in range(25):
        depths = [rng.randint(0, LANES) for _ in side.peers]
        if not any(depths):
            continue
        rows = [[rng.randint(0, STRIDE) for _ in range(LANES)] for _ in side.peers]
        work = [
            (peer, (layers, depth, mine))
            for peer, depth, mine in zip(side.peers, depths, rows, strict=True)
            if depth
        ]
        running = begin(work)
        assert side.step(layers, depths, rows) == [Status.OK] * len(side.peers)
        end(running)


@pytest.mark.parametrize("backend", ["ipc", "tcp"])
@pytest.mark.parametrize("until", [0, 4, 7])
def test_a_late_peer_costs_one_deadline_and_the_others_nothing(backend: str, until: int) -> None:
    side, rows = Side([backend] * 3), [[2] * LANES] * 3
    stops = [None, until, None]
    running = begin(
        [(peer, (4, 3, rows[0], stop)) for peer, stop in zip(side.peers, stops, strict=True)]
    )
    began = time.monotonic()
    statuses = side.step(4, [3, 3, 3], rows)
    assert statuses == [Status.OK, Status.DEADLINE, Status.OK]
    assert LATE_US / 1e6 <= time.monotonic() - began < 3 * LATE_US / 1e6
    end(running)


def test_a_peer_that_is_gone_is_left_out_at_once_and_the_last_one_too() -> None:
    side, rows = Side(["ipc", "ipc"]), [[2] * LANES] * 2
    running = begin([(side.peers[0], (4, 3, rows[0], 5)), (side.peers[1], (4, 3, rows[0]))])
    timer = threading.Timer(0.1, side.peers[0].link.close)
    timer.start()
    began = time.monotonic()
    assert side.step(4, [3, 3], rows, late_us=20_000_000) == [Status.PEER_GONE, Status.OK]
    assert time.monotonic() - began < 5
    end(running)
    # Nobody is left: the stream runs through.
    side.peers[1].link.close()
    assert side.step(4, [0, 3], rows, late_us=20_000_000) == [Status.OK, Status.PEER_GONE]


def test_no_doorbell_of_an_absent_peer_rings() -> None:
    side, rows = Side(["ipc", "tcp", "shm"]), [[1] * LANES] * 3
    running = begin([(side.peers[1], (2, 2, rows[1]))])
    assert side.step(2, [0, 2, 0], rows) == [Status.OK] * 3
    end(running)
    for peer in (side.peers[0], side.peers[2]):
        flags = [peer.first_flag + n for n in range(4)]
        assert not any(peer.answers.ready(lane, flag) for lane in range(LANES) for flag in flags)


def test_a_failed_stream_ends_its_step() -> None:
    side, rows = Side(["ipc"]), [[1] * LANES]
    plan = side.plan(2, 2)
    depths, counts = np.array([2], np.int32), np.array(rows, np.int32)
    side.gate.begin(plan, depths, counts, 60_000_000)
    with pytest.raises(CommError, match="has not ended"):
        side.gate.begin(plan, depths, counts, 60_000_000)
    side.gate.cancel()
    running = begin([(side.peers[0], (2, 2, rows[0]))])
    assert side.step(2, [2], rows) == [Status.OK]
    end(running)


@pytest.mark.parametrize(("first", "items"), [(0, 2), (1, 1), (2, 0), (3, 0), (-(2**30), 3)])
def test_an_answer_has_no_item_beyond_those_of_its_request(first: int, items: int) -> None:
    side = Side(["tcp"])
    (peer,) = side.peers
    data = np.zeros(2, np.int64)
    request = Message(0, [(0, data.ctypes.data, data.nbytes)], count=2)
    counts, firsts = (np.full((1, LANES), n, np.int32) for n in (3, first))
    side.gate.begin(side.plan(1, 1), np.array([1], np.int32), counts, LATE_US, firsts)
    assert peer.link.post(request, peer.first_flag) == Status.OK
    side.gate.enqueue_wait(0, 0, 1)
    side.gate.enqueue_ticket(0, 0, 1)
    assert side.gate.wait(0) == {}
    assert peer.answers.wait_all([0], [peer.first_flag], TIMEOUT_US) == [Status.OK]
    header = peer.answers.header(0)
    assert (header.count, header.nbytes) == (items, items * ITEM)


def test_wrong_arguments_are_refused() -> None:
    region = Region(4, 64, name="gate")
    gate = StepGate(region, peers=2, lanes=2)
    plan = StepPlan([(1, Message(0, []))], lanes=2, stride=1)
    depths, counts = np.array([0, 1], np.int32), np.zeros((2, 2), np.int32)
    with pytest.raises(CommError, match="peer 1 takes part in a step but is not set"):
        gate.begin(plan, depths, counts, 0)
    with pytest.raises(ValueError, match=r"int32 \[peers\]"):
        gate.begin(plan, depths[:1], counts, 0)
    with pytest.raises(CommError, match="at least one position"):
        StepPlan([], lanes=1, stride=1)
    with pytest.raises(CommError, match="lane 2 of a step with 2 lanes"):
        StepPlan([(2, Message(0, []))], lanes=2, stride=1)
    for call in (gate.enqueue_wait, gate.enqueue_ticket):
        with pytest.raises(IndexError):
            call(0, 2, 1)
    with pytest.raises(IndexError):
        gate.clear_peer(2)
    with pytest.raises(ValueError, match="whole"):
        Message(0, [], whole=1)
