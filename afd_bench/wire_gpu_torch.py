"""The two sides of `afd bench wire_gpu`. Rank 0 is attention, rank 1 the FFN."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise

import torch

from afd.errors import AfdError
from afd.wire.streams_torch import make_streams
from afd_bench import stand_in_nic
from afd_comm import Link, Message, Region, Status, VerbsOptions, make_flag

TIMEOUT_US = 20_000_000
WARM_UP = 3
SLEEP_CYCLES = 1_000_000
STAGED = "staged"
"""Backend verbs on a NIC that cannot register GPU memory."""


@dataclass(frozen=True)
class Settings:
    """devices: of attention and FFN. up, down: bytes. positions: messages of a micro-batch in one
    replay. replays: timed ones."""

    backend: str
    devices: tuple[str, str]
    depth: int
    up: int
    down: int
    work_us: float
    positions: int
    replays: int
    library: str
    connections: int = 0  # of backend tcp; 0: as many as the library takes
    trace: bool = False  # depth 1; each message carries times, and has a slot of its own

    @property
    def over(self) -> str:
        """The backend's name in afd_comm."""
        return "verbs" if self.backend == STAGED else self.backend

    @property
    def slots(self) -> int:
        return self.positions if self.trace else self.depth


class Side:
    """One side: its receive region, its link, and the step that it repeats."""

    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank = rank
        self.device = device = settings.devices[rank]
        self._depth, self._positions = settings.depth, settings.positions
        self._trace = settings.trace
        # A NIC of its own, as on a host of its own: with its line and its sending thread.
        self._options = (
            VerbsOptions(
                ports=[stand_in_nic.PORTS[rank]], host="127.0.0.1", library=settings.library
            )
            if settings.over == "verbs"
            else None
        )
        self.region = Region(
            settings.slots,
            (settings.down, settings.up)[rank],
            name=f"wire-{rank}",
            device=device,
            tcp_host="127.0.0.1" if settings.backend == "tcp" else None,
            verbs=self._options,
        )
        if device == "cpu":
            self.region.pin("cpu")
        nbytes = (settings.up, settings.down)[rank]
        self._data = torch.zeros(settings.depth, nbytes, dtype=torch.uint8, device=device)
        self._messages = [
            Message(slot, [(0, self._data[slot % settings.depth].data_ptr(), nbytes)])
            for slot in range(settings.slots)
        ]
        self._work = _worker(settings.work_us, device)
        self.streams = make_streams(torch.device(device))
        self.link: Link | None = None

    def connect(self, other: Side, settings: Settings) -> None:
        self.link = Link(
            other.region.addresses,
            backend=settings.over,
            slots=(0, settings.slots),
            trace=settings.trace,
            timeout_us=TIMEOUT_US,
            device=self.device,
            tcp_connections=settings.connections,
            verbs=self._options,
        )

    def step(self, before: int) -> None:
        """Enqueues the step; on a GPU within the stream that computes.

        before: number of the last message of the step before. A slot's number has to change.
        """
        first, last = before + 1, before + self._positions
        self.streams.begin_step(self._depth)
        for number in range(first, last + 1):
            for m in range(self._depth):
                if self.rank == 1:
                    self._wait(m, number)
                elif number > first:
                    self._wait(m, number - 1)
                self._work()
                self._send(m, number)
        for m in range(self._depth if self.rank == 0 else 0):
            self._wait(m, last)
        self.streams.join()

    def graph(self, before: int) -> torch.cuda.CUDAGraph:
        captured = torch.cuda.CUDAGraph()
        with (
            torch.cuda.device(self.device),
            self.streams.capturable(),
            torch.cuda.graph(captured, stream=torch.cuda.current_stream()),
        ):
            self.step(before)
        return captured

    def launch(self, graph: torch.cuda.CUDAGraph) -> None:
        with self.streams.capturable():
            graph.replay()

    def _slot(self, m: int, number: int) -> int:
        return (number - 1) % self._positions if self._trace else m

    def _wait(self, m: int, number: int) -> None:
        slot = self._slot(m, number)
        self.streams.wait_for(self.region, [slot], [make_flag(1, number)])

    def _send(self, m: int, number: int) -> None:
        assert self.link is not None
        self.streams.fork()
        message = self._messages[self._slot(m, number)]
        status = self.link.enqueue(self.streams.copy, message, make_flag(1, number))
        if status != Status.OK:
            raise AfdError(f"enqueue failed with {status.name}; link: {self.link.notes}")


@dataclass(frozen=True)
class Parts:
    """Where a round trip's time goes, us.

    up, down: from the ticket that the sending thread saw to the doorbell that it rang at the
    receiver, staged copies included. ffn: from the doorbell to the ticket of the answer. attention:
    from the answer's doorbell to the next ticket.
    """

    up: float
    ffn: float
    down: float
    attention: float


def measure(settings: Settings) -> list[float]:
    """Returns us per position and micro-batch, one value per replay."""
    with _opened(settings) as (_, run):
        return list(_timed(settings, run))


def measure_parts(settings: Settings) -> list[Parts]:
    """Of all round trips but the last one of each replay. settings: no work, trace, no ipc."""
    out = []
    with _opened(settings) as (sides, run):
        for _ in _timed(settings, run):
            trips = range(settings.positions)
            answers, asked = ([side.region.header(n) for n in trips] for side in sides)
            for to, back, after in zip(asked, answers, asked[1:], strict=False):
                ticks = (to.t_posted, to.t_arrived, back.t_posted, back.t_arrived, after.t_posted)
                out.append(Parts(*(1e-3 * (b - a) for a, b in pairwise(ticks))))
    return out


@contextlib.contextmanager
def _opened(settings: Settings) -> Iterator[tuple[Sequence[Side], Callable[[], None]]]:
    """Both sides, connected, and what runs one replay."""
    with _nic(settings):
        sides = [Side(rank, settings) for rank in range(2)]
        for side, other in zip(sides, reversed(sides), strict=True):
            side.connect(other, settings)
    steps = cycle((0, settings.positions) if settings.trace else (0,))
    yield sides, (_on_gpu if settings.devices[0] != "cpu" else _on_cpu)(sides, steps)
    for side in sides:
        assert side.link is not None
        if side.link.status != Status.OK:
            raise AfdError(f"the link failed: {side.link.status.name}; {side.link.notes}")
        side.link.close()


def _timed(settings: Settings, run: Callable[[], None]) -> Iterator[float]:
    """Yields us per position and micro-batch of each replay, after the warm-up."""
    for number in range(WARM_UP + settings.replays):
        began = time.perf_counter()
        run()
        took = time.perf_counter() - began
        if number >= WARM_UP:
            yield 1e6 * took / (settings.positions * settings.depth)


@contextlib.contextmanager
def _nic(settings: Settings) -> Iterator[None]:
    """While regions and links are opened: what the NIC without hardware registers."""
    if settings.backend != STAGED:
        yield
        return
    nic = ctypes.CDLL(settings.library)
    nic.fake_refuse_devices(1)
    yield
    nic.fake_refuse_devices(0)


def _on_gpu(sides: list[Side], steps: Iterator[int]) -> Callable[[], None]:
    gpus = {side.device for side in sides}
    for gpu in gpus:
        torch.cuda.synchronize(gpu)  # kernels are loaded, and memory is zero
    captured: dict[int, list[torch.cuda.CUDAGraph]] = {}

    def run() -> None:
        before = next(steps)
        if before not in captured:
            captured[before] = [side.graph(before) for side in sides]
        for side, graph in zip(reversed(sides), reversed(captured[before]), strict=True):
            side.launch(graph)
        for gpu in gpus:
            torch.cuda.synchronize(gpu)

    return run


def _on_cpu(sides: list[Side], steps: Iterator[int]) -> Callable[[], None]:
    def run() -> None:
        before = next(steps)
        ffn = threading.Thread(target=sides[1].step, args=(before,))
        ffn.start()
        sides[0].step(before)
        ffn.join()

    return run


def _worker(us: float, device: str) -> Callable[[], None]:
    """Returns what takes ``us``: a sleeping kernel, or a busy CPU."""
    if us == 0:
        return lambda: None
    if device == "cpu":
        return lambda: _spin(us)
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP_CYCLES)
        begin.record()
        torch.cuda._sleep(SLEEP_CYCLES)
        end.record()
        torch.cuda.synchronize()
    cycles = int(SLEEP_CYCLES * us / (1e3 * begin.elapsed_time(end)))
    return lambda: torch.cuda._sleep(cycles)


def _spin(us: float) -> None:
    end = time.perf_counter() + 1e-6 * us
    while time.perf_counter() < end:
        pass
