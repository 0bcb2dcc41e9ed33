"""The processes of `afd bench gpu step3`: attention GPUs first, then as many FFN GPUs.

Each process captures a step as a graph and replays it; on CPU it runs the step eagerly. No host
takes part in a replay: the two sides synchronize only through doorbells. With one pair of GPUs an
attention GPU sends its rows twice to the same FFN GPU and gets two answers, so that the bytes per
GPU are those of two instances per side.
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

from afd.devices import device_of_torch
from afd.metrics.step_trace import NoTimestamps, StageTimestamps, StepTimestamps
from afd.schedule import stream_sequence
from afd.wire.layout import layouts
from afd.wire.slot_torch import sum_of_parts
from afd.wire.slot_view_torch import SlotView
from afd.wire.streams_torch import Streams, make_streams, slot_bytes, synchronize
from afd_bench.step3.layer_torch import Experts, make_attention
from afd_bench.step3.load import Load
from afd_comm import Link, Region, Status, make_flag
from afd_comm import Message as WireMessage
from ffn_worker.slots import EncodedAnswers

_TIMEOUT_US = 60_000_000
_TIMESTAMPED_STEPS = 20
"""Steps that run one by one with stage timestamps."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run.

    load: fields of :class:`Load`. layers: of a step. steps: timed steps. pairs: number of attention
    GPUs and of FFN GPUs. distinct: layers with their own weights.
    """

    load: dict[str, Any]
    layers: int
    steps: int
    pairs: int
    distinct: int
    device: str


@dataclass(frozen=True)
class Message:
    """One of the two messages that a process sends, and receives, per position.

    peer: rank of the other process. sends_to, comes_to: number of the message at the peer and here;
    slots are numbered by message, then micro-batch.
    """

    peer: int
    sends_to: int
    comes_to: int


def messages(rank: int, pairs: int, load: Load) -> list[Message]:
    """Returns the messages of a process.

    Rows of attention instance i are message i at every FFN instance; the answer from FFN instance j
    is message j. With one pair, the same GPU plays both instances of a side.
    """
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
    """The transport and the streams of one process."""

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
        """Runs every kernel once, because loading a kernel behind a wait can deadlock
        (comm/README.md)."""

    @abstractmethod
    def step(self, timestamps: StageTimestamps) -> list[object]:
        """Enqueues a step on the streams; returns objects that must live until it is finished."""

    def slots(self, micro_batch: int) -> list[int]:
        return [m.comes_to * self.load.depth + micro_batch for m in self.messages]

    def wait(self, stream: int, micro_batch: int, position: int) -> list[SlotView]:
        """Enqueues a wait for this position's messages; returns their views."""
        slots = self.slots(micro_batch)
        flags = [make_flag(1, stream_sequence(position + 1))] * len(slots)
        self.region.enqueue_wait(stream, slots, flags)
        self.waits[0].extend(slots)
        self.waits[1].extend(flags)
        return [self.views[slot] for slot in slots]

    def send(
        self,
        micro_batch: int,
        position: int,
        parts: list[list[tuple[int, int, int]]],
        timestamps: StageTimestamps,
    ) -> None:
        """Enqueues the messages of a position. parts: (offset, address, bytes) of each message."""
        for m, link, own in zip(self.messages, self._links, parts, strict=True):
            status = link.enqueue(
                self.streams.copy,
                WireMessage(m.sends_to * self.load.depth + micro_batch, own),
                make_flag(1, stream_sequence(position + 1)),
            )
            if status != Status.OK:
                raise SystemExit(f"enqueue failed with {status!r}; see the other side's message")
        timestamps.copied()


class AttentionSide(Side):
    def __init__(self, rank: int, settings: Settings, load: Load) -> None:
        super().__init__(rank, settings, load)
        self._kernels = make_attention(load, self.distinct, self.device)
        shape = (load.depth, load.rows, load.hidden)
        self._inputs = torch.randn(shape, device=self.device).bfloat16()

    def warm_up(self) -> None:
        self.streams.begin_step(self.load.depth)
        for mb in range(self.load.depth):
            views = [self.views[slot] for slot in self.slots(mb)]
            sum_of_parts(views, self.load.rows, torch.bfloat16)
            for parts in (self._parts(views), [self._inputs[mb]]):
                hidden = self._kernels.attend(0, mb, parts)
            self.streams.fork()
            with self.streams.copying():
                self._kernels.message(0, hidden)
            self.streams.join()

    def step(self, timestamps: StageTimestamps) -> list[object]:
        depth = self.load.depth
        kept: list[object] = []
        self.streams.begin_step(depth)
        for position in range(self.layers * depth):
            layer, mb = divmod(position, depth)
            parts = [self._inputs[mb]]
            if layer:
                parts = self._parts(self._answers(mb, position - depth, timestamps))
            hidden = self._kernels.attend(layer, mb, parts)
            timestamps.done(layer, mb, self.load.rows)
            self.streams.fork()
            with self.streams.copying():
                message = self._kernels.message(layer, hidden)
            kept += [hidden, message]
            self.send(mb, position, [message.parts(self.outgoing)] * len(self.messages), timestamps)
        for mb in range(depth):
            views = self._answers(mb, (self.layers - 1) * depth + mb, timestamps)
            kept.append(sum_of_parts(views, self.load.rows, torch.bfloat16))
        return kept

    def _answers(
        self, micro_batch: int, position: int, timestamps: StageTimestamps
    ) -> list[SlotView]:
        views = self.wait(self.streams.compute, micro_batch, position)
        timestamps.working()
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

    def step(self, timestamps: StageTimestamps) -> list[object]:
        rows, depth, last = self.load.rows, self.load.depth, self.layers * self.load.depth
        kept: list[object] = []
        self.streams.begin_step(depth)
        for position in range(last):
            layer, mb = divmod(position, depth)
            with self.streams.apart(mb):
                views = self.wait(self.streams.compute, mb, position)
                timestamps.working()
                out = self._experts.compute(layer, mb, views)
                answers = EncodedAnswers.of(out, self.outgoing)
                kept.append(answers)
                timestamps.done(layer, mb, self.load.ffn_rows)
                self.streams.fork()
                parts = [answers.parts(m * rows, rows) for m in range(len(self.messages))]
                self.send(mb, position, parts, timestamps)
        return kept


class Replay:
    """A step that can be repeated: a captured graph on a GPU, enqueued anew each time on CPU."""

    def __init__(self, side: Side, timestamps: StageTimestamps) -> None:
        self._side, self._timestamps = side, timestamps
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kept: list[object] = []
        if device_of_torch(side.device.type).captures_graphs:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=torch.cuda.current_stream()):
                self._run()

    def _run(self) -> None:
        self._side.waits = ([], [])
        self._timestamps.begin()
        self._kept = self._side.step(self._timestamps)
        self._side.streams.join()
        self._timestamps.end()
        self._waits = self._side.waits

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()

    def finish(self) -> None:
        """Waits for the streams with a deadline, so that a lost peer cannot hang the run."""
        guard = self._side.region.guard(self._side.streams.compute, *self._waits)
        if set(guard.wait(_TIMEOUT_US)) != {Status.OK}:
            raise SystemExit("the other side of the Step-3 slice is gone; see its message above")


def timed(replay: Replay, side: Side, steps: int) -> list[float]:
    """Runs ``steps`` steps; returns the seconds of each, begin to begin, measured on the device."""
    stamps = []
    for _ in range(steps):
        stamps.append(side.streams.stamp())
        replay()
    stamps.append(side.streams.stamp())
    replay.finish()
    return [side.streams.elapsed_ns(a, b) / 1e9 for a, b in pairwise(stamps)]


def with_timestamps(side: Side) -> list[dict[str, Any]]:
    """Runs steps one at a time; returns their stage timestamps."""
    timestamps, found = StepTimestamps(side.streams), []
    replay = Replay(side, timestamps)
    for _ in range(_TIMESTAMPED_STEPS):
        if side.device.type == "cpu":
            timestamps = StepTimestamps(side.streams)
            replay = Replay(side, timestamps)
        dist.barrier()
        began_ns = time.monotonic_ns()
        replay()
        replay.finish()
        step = timestamps.read(began_ns, replayed=True)
        assert step is not None
        found.append(asdict(step))
    return found


def measure(rank: int, settings: Settings, out: str) -> None:
    """Runs one process, which writes its results to the file ``out``.RANK.

    The processes rendezvous through the file ``out``.meeting.
    """
    began = time.monotonic()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{out}.meeting",
        rank=rank,
        world_size=2 * settings.pairs,
    )

    def progress(what: str) -> None:
        print(f"process {rank}: {what} after {time.monotonic() - began:.0f} s", flush=True)

    load = Load(**settings.load)
    kind = AttentionSide if rank < settings.pairs else FfnSide
    with torch.inference_mode():
        side = kind(rank, settings, load)
        side.warm_up()
        synchronize(side.device)
        progress("kernels loaded")
        plain = Replay(side, NoTimestamps())
        progress("step captured")
        dist.barrier()  # no side may wait for the other before both have loaded and captured
        timed(plain, side, 3)
        progress("three steps finished")
        began_s = time.time()
        times = timed(plain, side, settings.steps)
        window_s = began_s, time.time()
        progress("steps of " + " ".join(f"{1e3 * t:.1f}" for t in times) + " ms finished")
        dist.barrier()
        steps = with_timestamps(side)
    with open(f"{out}.{rank}", "w", encoding="utf-8") as file:
        json.dump({"times": times, "steps": steps, "window_s": window_s}, file)
    dist.barrier()


if __name__ == "__main__":
    chosen = Settings(**json.loads(sys.argv[1]))
    mp.spawn(measure, (chosen, sys.argv[2]), nprocs=2 * chosen.pairs)
