"""Times of calls on a CPU or a GPU, eager and as a replayed graph; and a machine's ceilings."""

import statistics
import time
from collections.abc import Callable

import torch

from ffn_worker.bench.shapes import Ceilings

Call = Callable[[], object]
Clock = Callable[[Call, int], float]
"""(call, repetitions) -> seconds of one repetition, the median of a few rounds."""

_ROUNDS = 5


def cpu_clock(call: Call, repetitions: int) -> float:
    call()
    rounds = []
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for _ in range(repetitions):
            call()
        rounds.append((time.perf_counter() - started) / repetitions)
    return statistics.median(rounds)


def gpu_clock(call: Call, repetitions: int) -> float:
    """By events on the current stream."""
    for _ in range(2):
        call()
    rounds = []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(repetitions):
            call()
        end.record()
        end.synchronize()
        rounds.append(begin.elapsed_time(end) / 1e3 / repetitions)
    return statistics.median(rounds)


def clock_of(device: torch.device) -> Clock:
    return cpu_clock if device.type == "cpu" else gpu_clock


def as_graph(call: Call) -> Call:
    """``call`` captured; it ran before, so that its kernels are compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def on_streams(call: Call, count: int) -> Call:
    """``call`` on ``count`` streams at once, as a pipeline computes its micro-batches."""
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
    """Of one of ``count`` calls, each told its number, one behind the other in a replayed graph."""

    def every() -> None:
        for number in range(count):
            call(number)

    return gpu_clock(as_graph(every), repetitions) / count


def repetitions_for(seconds: float, wanted_s: float) -> int:
    """How often a call of ``seconds`` is repeated so that a round takes ``wanted_s``."""
    return max(1, min(1000, int(wanted_s / max(seconds, 1e-7))))


def ceilings(device: torch.device) -> Ceilings:
    """A copy far larger than any cache, and products of large square matrices."""
    clock, on_gpu = clock_of(device), device.type != "cpu"
    size = 2**30 if on_gpu else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * size / clock(lambda: target.copy_(source), 5)
    n = 8192 if on_gpu else 512
    a = torch.randn(n, n, device=device).bfloat16()
    plain = 2 * n**3 / clock(lambda: a @ a, 5)
    flops = {"plain": plain, "fp8_block": plain, "mxfp4": plain}
    if on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
        one = torch.ones((), device=device)
        fp8 = a.to(torch.float8_e4m3fn)

        def scaled() -> torch.Tensor:
            return torch._scaled_mm(fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)

        flops["fp8_block"] = 2 * n**3 / clock(scaled, 5)
    # MXFP4 is multiplied in bfloat16 on Hopper and gfx942; where there are FP4 instructions this
    # ceiling is too low, which the ratio then shows.
    return Ceilings(rate, flops)
