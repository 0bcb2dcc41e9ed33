"""Times calls on a CPU or a GPU, eager and as replayed graphs."""

import random
import statistics
import time
from collections.abc import Callable, Mapping

import torch

from ffn_worker.moe.device import launched_as

Call = Callable[[], object]
Clock = Callable[[Call, int], float]
"""(call, repetitions) -> seconds of one repetition; the median of a few rounds."""

_ROUNDS = 5


def cpu_clock(call: Call, repetitions: int) -> float:
    call()
    return statistics.median(_cpu_round(call, repetitions) for _ in range(_ROUNDS))


def gpu_clock(call: Call, repetitions: int) -> float:
    """A :data:`Clock` that uses events on the current stream."""
    for _ in range(2):
        call()
    return statistics.median(_gpu_round(call, repetitions) for _ in range(_ROUNDS))


def _cpu_round(call: Call, repetitions: int) -> float:
    started = time.perf_counter()
    for _ in range(repetitions):
        call()
    return (time.perf_counter() - started) / repetitions


def _gpu_round(call: Call, repetitions: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repetitions):
        call()
    end.record()
    end.synchronize()
    elapsed_ms: float = begin.elapsed_time(end)
    return elapsed_ms / 1e3 / repetitions


def in_turns(device: torch.device, calls: Mapping[str, Call], round_s: float) -> dict[str, float]:
    """Seconds of each call: the median of rounds of about ``round_s`` seconds.

    Rounds of all calls are interleaved. A GPU at its power limit changes its clock within
    milliseconds, depending on the load; so all calls run at the same clock.
    """
    one_round = _cpu_round if device.type == "cpu" else _gpu_round
    repetitions = {}
    for name, call in calls.items():
        call()
        call()
        repetitions[name] = repetitions_for(one_round(call, 1), round_s)
    rounds: dict[str, list[float]] = {name: [] for name in calls}
    order, draw = list(calls), random.Random(0)
    for _ in range(_ROUNDS):
        draw.shuffle(order)  # the previous call affects a call
        for name in order:
            rounds[name].append(one_round(calls[name], repetitions[name]))
    return {name: statistics.median(found) for name, found in rounds.items()}


def clock_of(device: torch.device) -> Clock:
    """The clock for a device."""
    return cpu_clock if device.type == "cpu" else gpu_clock


def as_graph(call: Call) -> Call:
    """Captures ``call`` after one call that compiles its kernels; returns the replay."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), launched_as("graph"):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def on_streams(call: Call, count: int) -> Call:
    """``call`` on ``count`` streams concurrently, as a pipeline computes its micro-batches."""
    streams = [torch.cuda.Stream() for _ in range(count)]

    def every() -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                call()
        for stream in streams:
            current.wait_stream(stream)

    return every


def graph_seconds(call: Callable[[int], object], count: int, repetitions: int) -> float:
    """Seconds per call of ``count`` calls in sequence in a replayed graph.

    call: gets the number of the call.
    """

    def every() -> None:
        for number in range(count):
            call(number)

    return gpu_clock(as_graph(every), repetitions) / count


def repetitions_for(seconds: float, wanted_s: float) -> int:
    """Repetitions of a call of ``seconds`` that make a round of about ``wanted_s``."""
    return max(1, min(1000, int(wanted_s / max(seconds, 1e-7))))
