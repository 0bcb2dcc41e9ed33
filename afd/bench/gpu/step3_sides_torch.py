"""The processes of `afd bench gpu step3`: attention GPUs first, then as many FFN GPUs.

Each side captures one graph of a step (on CPU: runs it as it comes) and replays it; no host is on
the path, and the sides are coupled by nothing but their doorbells. With one pair of GPUs an
attention GPU sends its rows twice to the same FFN GPU, and gets two answers: the bytes per GPU are
those of two instances on each side.
"""

import json
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from afd.bench.gpu.step3_kernels_torch import Experts, make_attention
from afd.bench.gpu.step3_load import Load
from afd.schedule import stream_sequence
from afd.step_trace import Marks, NoMarks, StepMarks
from afd.wire.layout import layouts
from afd.wire.slot_torch import SlotView, sum_of_parts
from afd.wire.streams_torch import Streams, make_streams, settle, slot_bytes
from afd_comm import Link, Region, Status, make_flag
from ffn_worker.answers import Answers

_TIMEOUT_US = 60_000_000
_MARKED = 20
"""Steps that are run one by one, with marks."""


@dataclass(frozen=True)
class Settings:
    """pairs: attention GPUs, and FFN GPUs. distinct: layers of weights."""

    load: dict[str, int]
    layers: int
    steps: int
    pairs: int
    distinct: int
    device: str


@dataclass(frozen=True)
class Message:
    """One of the two messages that a side sends, and gets, per position. peer: rank; slots are
    numbered by message, then micro-batch."""

    peer: int
    sends_to: int
    comes_to: int


def messages(rank: int, pairs: int, load: Load) -> list[Message]:
    """Attention instance i's rows are message i of every FFN instance; its answer from FFN instance
    j is message j. With one pair both instances of a side are the same GPU."""
    side = rank % pairs
    if rank < pairs:
        return [
            Message(pairs + j % pairs, side if pairs > 1 else j, j)
            for j in range(load.ffn_instances)
        ]
    return [
        Message(i % pairs, side if pairs > 1 else i, i) for i in range(load.attention_instances)
    ]


class Side(ABC):
    """Transport and streams of one process."""

    def __init__(self, rank: int, settings: Settings, load: Load) -> None:
        self.load, self.layers = load, settings.layers
        self.distinct = settings.distinct
        a2f, f2a = layouts("fp8", "bfloat16", load.rows, load.hidden, load.top_k)
        self.incoming, self.outgoing = (f2a, a2f) if rank < settings.pairs else (a2f, f2a)
        where = "cpu" if settings.device == "cpu" else f"cuda:{rank}"
        self.device = torch.device(where)
        if settings.device != "cpu":
            torch.cuda.set_device(self.device)
            torch.cuda.set_stream(torch.cuda.Stream(self.device))
        self.messages = messages(rank, settings.pairs, load)
        slots = len(self.messages) * load.depth
        self.region = Region(slots, self.incoming.nbytes, name=f"step3-{rank}", device=where)
        if settings.device == "cpu":
            self.region.pin("cpu")
        addresses: list[list[str]] = [[] for _ in range(2 * settings.pairs)]
        dist.all_gather_object(addresses, self.region.addresses)
        self._links = [
            Link(
                addresses[m.peer],
                backend="ipc",
                slots=(m.sends_to * load.depth, load.depth),
                timeout_us=_TIMEOUT_US,
                device=where,
            )
            for m in self.messages
        ]
        self.streams: Streams = make_streams(self.device, load.depth)
        self.views = [SlotView(slot_bytes(self.region, s), self.incoming) for s in range(slots)]
        self.waits: tuple[list[int], list[int]] = ([], [])

    @abstractmethod
    def warm_up(self) -> None:
        """Run every kernel once: what loads them must not come behind a wait (comm/README.md)."""

    @abstractmethod
    def step(self, marks: Marks) -> list[object]:
        """Give a step to the streams; answers what has to live until they are through."""

    def slots(self, micro_batch: int) -> list[int]:
        return [m.comes_to * self.load.depth + micro_batch for m in self.messages]

    def wait(self, stream: int, micro_batch: int, position: int) -> list[SlotView]:
        """The stream waits for this position's messages."""
        slots = self.slots(micro_batch)
        flags = [make_flag(1, stream_sequence(position + 1))] * len(slots)
        self.region.enqueue_wait(stream, slots, flags)
        self.waits[0].extend(slots)
        self.waits[1].extend(flags)
        return [self.views[slot] for slot in slots]

    def send(
        self, micro_batch: int, position: int, parts: list[list[tuple[int, int, int]]], marks: Marks
    ) -> None:
        """parts: of each message."""
        for m, link, own in zip(self.messages, self._links, parts, strict=True):
            status = link.enqueue(
                self.streams.copy,
                m.sends_to * self.load.depth + micro_batch,
                make_flag(1, stream_sequence(position + 1)),
                0,
                micro_batch,
                self.load.rows,
                self.load.depth,
                0,
                self.outgoing.tag,
                0,
                own,
            )
            if status != Status.OK:
                raise SystemExit(f"enqueue: {status!r}")
        marks.copied()


class AttentionSide(Side):
    def __init__(self, rank: int, settings: Settings, load: Load) -> None:
        super().__init__(rank, settings, load)
        self._kernels = make_attention(load, self.distinct, self.device)
        shape = (load.depth, load.rows, load.hidden)
        self._inputs = torch.randn(shape, device=self.device).bfloat16()

    def warm_up(self) -> None:
        for mb in range(self.load.depth):
            views = [self.views[slot] for slot in self.slots(mb)]
            sum_of_parts(views, self.load.rows, torch.bfloat16)
            for parts in (self._parts(views), [self._inputs[mb]]):
                hidden = self._kernels.attend(0, mb, parts)
            self.streams.fork()
            with self.streams.copying():
                self._kernels.message(0, hidden)
            self.streams.join()

    def step(self, marks: Marks) -> list[object]:
        depth = self.load.depth
        kept: list[object] = []
        for position in range(self.layers * depth):
            layer, mb = divmod(position, depth)
            parts = [self._inputs[mb]]
            if layer:
                parts = self._parts(self._answers(mb, position - depth, marks))
            hidden = self._kernels.attend(layer, mb, parts)
            marks.done(layer, mb, self.load.rows)
            self.streams.fork()
            with self.streams.copying():
                message = self._kernels.message(layer, hidden)
            kept += [hidden, message]
            self.send(mb, position, [message.parts(self.outgoing)] * len(self.messages), marks)
        for mb in range(depth):
            views = self._answers(mb, (self.layers - 1) * depth + mb, marks)
            kept.append(sum_of_parts(views, self.load.rows, torch.bfloat16))
        return kept

    def _answers(self, micro_batch: int, position: int, marks: Marks) -> list[SlotView]:
        views = self.wait(self.streams.compute, micro_batch, position)
        marks.working()
        return views

    def _parts(self, views: list[SlotView]) -> list[torch.Tensor]:
        return [view.payload[: self.load.rows] for view in views]


class FfnSide(Side):
    def __init__(self, rank: int, settings: Settings, load: Load) -> None:
        super().__init__(rank, settings, load)
        self._experts = Experts(load, self.distinct, self.device)

    def warm_up(self) -> None:
        for mb in range(self.load.depth):
            self._experts.compute(0, mb, [self.views[slot] for slot in self.slots(mb)])

    def step(self, marks: Marks) -> list[object]:
        rows, depth, last = self.load.rows, self.load.depth, self.layers * self.load.depth
        kept: list[object] = []
        self.streams.begin_step()
        for position in range(last):
            layer, mb = divmod(position, depth)
            with self.streams.apart(mb):
                views = self.wait(self.streams.compute, mb, position)
                marks.working()
                out = self._experts.compute(layer, mb, views)
                answers = Answers.of(out, self.outgoing)
                kept.append(answers)
                marks.done(layer, mb, self.load.ffn_rows)
                self.streams.fork()
                parts = [answers.parts(m * rows, rows) for m in range(len(self.messages))]
                self.send(mb, position, parts, marks)
        return kept


class Replay:
    """A step, captured where there is a GPU; on CPU given to the streams anew each time."""

    def __init__(self, side: Side, marks: Marks) -> None:
        self._side, self._marks = side, marks
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kept: list[object] = []
        if side.device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._run()

    def _run(self) -> None:
        self._side.waits = ([], [])
        self._marks.begin()
        self._kept = self._side.step(self._marks)
        self._side.streams.join()
        self._marks.end()
        self._waits = self._side.waits

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def finish(self) -> None:
        """Wait for the streams, with a deadline: a lost peer must not hang the run."""
        guard = self._side.region.guard(self._side.streams.compute, *self._waits)
        if set(guard.wait(_TIMEOUT_US)) != {Status.OK}:
            raise SystemExit("the other side of the Step-3 slice is gone; its message is above")


def timed(replay: Replay, side: Side, steps: int) -> list[float]:
    """Seconds from the begin of each step to the next one's, measured on the device."""
    stamps = []
    for _ in range(steps):
        stamps.append(side.streams.stamp())
        replay()
    stamps.append(side.streams.stamp())
    replay.finish()
    return [side.streams.elapsed_ns(a, b) / 1e9 for a, b in pairwise(stamps)]


def with_marks(side: Side) -> list[dict[str, Any]]:
    """The stages of some steps, each run by itself."""
    marks, found = StepMarks(side.streams), []
    replay = Replay(side, marks)
    for _ in range(_MARKED):
        if side.device.type == "cpu":
            marks = StepMarks(side.streams)
            replay = Replay(side, marks)
        dist.barrier()
        began_ns = time.monotonic_ns()
        replay()
        replay.finish()
        step = marks.read(began_ns, replayed=True)
        assert step is not None
        found.append(asdict(step))
    return found


def measure(rank: int, settings: Settings, out: str) -> None:
    """One process; writes what it has seen to the file ``out``.RANK. The processes meet in a file
    beside it."""
    began = time.monotonic()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}.meeting",
        rank=rank,
        world_size=2 * settings.pairs,
    )

    def tell(what: str) -> None:
        print(f"process {rank}: {what} after {time.monotonic() - began:.0f} s", flush=True)

    load = Load(**settings.load)
    kind = AttentionSide if rank < settings.pairs else FfnSide
    with torch.inference_mode():
        side = kind(rank, settings, load)
        side.warm_up()
        settle(side.device)
        tell("kernels are loaded")
        plain = Replay(side, NoMarks())
        tell("the step is recorded")
        dist.barrier()  # nothing is waited for before both sides have loaded and captured
        timed(plain, side, 3)
        tell("three steps are through")
        began_s = time.time()
        times = timed(plain, side, settings.steps)
        window_s = began_s, time.time()
        tell("steps of " + " ".join(f"{1e3 * t:.1f}" for t in times) + " ms are through")
        dist.barrier()
        steps = with_marks(side)
    with open(f"{out}.{rank}", "w", encoding="utf-8") as file:
        json.dump({"times": times, "steps": steps, "window_s": window_s}, file)
    dist.barrier()


if __name__ == "__main__":
    chosen = Settings(**json.loads(sys.argv[1]))
    mp.spawn(measure, (chosen, sys.argv[2]), nprocs=2 * chosen.pairs)
