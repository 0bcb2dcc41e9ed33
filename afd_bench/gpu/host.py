"""What the host adds to a decode step: the served step time over the step's time on the device.

A served step is the time per token of a full batch. Its time on the device is that of the replayed
graph, as the GPU's events measure it. The difference is the host's: scheduling, preparing inputs,
sampling and sending tokens on. With ``pipeline.lookahead`` the host works during the replay.

On one GPU both sides share it in time slices. Steps take longer then than on two GPUs, so the same
host time is a smaller part of them; "host ms" is the part that compares with other runs.
Prompts are filled, experts are random (ffn.load is dummy), and no colocated vLLM runs.

--phases also prints what `afd serve` said while it started, with the seconds of each line.
"""

import argparse
import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from afd.errors import AfdError
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_model,
    count,
    gpus_case,
    model_of,
    parser,
    report,
    usable_gpus,
)
from afd_bench.gpu.kv import kv_gib
from afd_bench.gpu.load import Load, Steady, held, rate, read
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.targets import Afd, Sizes, Target, fitted, vllm_args
from afd_bench.servers import Server
from afd_planner.facts.model_hf import load_model

_DEPTH, _CONTEXT = 2, 64
_DEEP = 48
"""From so many layers on, AIM_DEEP is the aim."""
AIM_DEEP = 1.03
AIM = 1.15
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_SPARE = 200
"""Tokens of an answer beside those of the measured steps: requests start one after the other."""
_POLL_S = 0.2
_CELL_S = 20.0  # estimated time of a measurement, with its ramp-up


@dataclass(frozen=True)
class Cell:
    """One measurement. tpot_s, device_s: of a served step, and of its graph on the device."""

    layers: int
    requests: int
    gpu: str
    lookahead: bool
    tpot_s: float
    device_s: float
    depth: int = _DEPTH
    context: int = _CONTEXT

    @property
    def case(self) -> str:
        """``LAYERS REQUESTS GPU``, then what is not a default."""
        further = " no lookahead" * (not self.lookahead)
        if self.depth != _DEPTH:
            further += f" depth {self.depth}"
        if self.context != _CONTEXT:
            further += f" context {self.context}"
        return f"{self.layers} {self.requests} {self.gpu}{further}"

    @property
    def over(self) -> float:
        return self.tpot_s / self.device_s

    @property
    def host_ms(self) -> float:
        return 1e3 * (self.tpot_s - self.device_s)

    @property
    def aim(self) -> float:
        return AIM_DEEP if self.layers >= _DEEP else AIM


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    budget, out = Budget(args.seconds), report("host", args, "host", argv)
    length = args.context + args.steps + _SPARE
    model_slice, path = model_of(args, args.model, length, experts=False)
    gpus = 0 if args.device == "cpu" else min(2, usable_gpus())
    targets = deployments(gpus, args.lookahead)
    cache = kv_gib(targets, max(args.requests), length, load_model(str(path)))
    sizes = Sizes(max(args.requests), length, cache, tuple(args.requests))
    flags = [*vllm_args(args.device, True), *args.vllm_args]
    gpu = gpus_case(gpus)
    cells = 0
    with running(targets, Setup(path, sizes, args.device, flags, args.logs)) as servers:
        for requests, (target, server) in product(args.requests, servers.items()):
            what = f"{target.label} requests {requests}"
            if not budget.allows(what, _CELL_S):
                break
            load = Load(requests, args.context, length, model_slice.sizes.vocab, args.seed)
            try:
                server.set_depth(args.depth)
                time.sleep(_PROPAGATION_S)
                found = asyncio.run(measured(server, load, args.steps))
            except AfdError as err:
                print(f"{what}: FAILED: {err}", flush=True)
                continue
            cells += 1
            ahead = isinstance(target, Afd) and target.lookahead
            cell = Cell(
                model_slice.sizes.layers,
                requests,
                gpu,
                ahead,
                found.tpot_s,
                found.device_s,
                args.depth,
                args.context,
            )
            _report(cell, out)
        for server in servers.values() if args.phases else ():
            print("\n  ".join([f"{server.log}:", *phases(server.log.read_text())]), flush=True)
    return 0 if cells == len(args.requests) * len(targets) else 1


def deployments(gpus: int, lookahead: str) -> list[Target]:
    """Returns 1A1F on so many GPUs, 0 for the CPU; lookahead: off, on or both."""
    one = fitted(Afd(1, 1, dummy=True), gpus)
    values = {"off": (False,), "on": (True,), "both": (True, False)}[lookahead]
    return [replace(one, lookahead=on) for on in values]


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser("host", __doc__, 150.0)
    add_model(options, "qwen3-30b")
    options.add_argument(
        "--requests", type=count, nargs="+", default=[256], help="requests at a time"
    )
    options.add_argument(
        "--context", type=count, default=_CONTEXT, help="tokens of a prompt, filled"
    )
    options.add_argument(
        "--depth", type=int, default=_DEPTH, choices=(1, 2, 3), help="micro-batches in flight"
    )
    options.add_argument(
        "--lookahead", default="both", choices=("off", "on", "both"),
        help="pipeline.lookahead; both: a deployment with and one without it, at the same time",
    )  # fmt: skip
    options.add_argument("--steps", type=count, default=250, help="steps of a measurement")
    options.add_argument("--phases", action="store_true", help="print the phases of the start")
    return options.parse_args(argv)


async def measured(server: Server, load: Load, steps: int) -> Steady:
    """Measures about ``steps`` steps, so many that one more or less changes little.

    Raises:
        AfdError: as :func:`afd_bench.gpu.load.rate`.
    """
    async with held(server, load) as before:
        first = last = await read(server)
        while last.generated - first.generated < steps * load.requests:
            await asyncio.sleep(_POLL_S)
            last = await read(server)
            if last.running < load.requests:
                break
    return rate(before, first, last, load.requests)


def phases(log: str) -> list[str]:
    """Returns what `afd serve` said about its start, with seconds, until it was ready."""
    return re.findall(r"^\[afd\] (\d+ s, .*|ready after \d+ s)", log, re.MULTILINE)


def _report(cell: Cell, out: Report) -> None:
    if not cell.device_s:
        print(f"{cell.case}: step {1e3 * cell.tpot_s:.3f} ms, not replayed as a graph", flush=True)
        return
    print(
        f"{cell.case}: step {1e3 * cell.tpot_s:.3f} ms, {1e3 * cell.device_s:.3f} on the device:"
        f" {cell.over:.3f} (aim {cell.aim:g}), host {cell.host_ms:.3f} ms",
        flush=True,
    )
    aim = (cell.case, "step_over_device", cell.over, "x", "aim", cell.aim)
    out.add(*aim, more_is_better=False)
    times = (cell.case, "step_ms", 1e3 * cell.tpot_s, "ms", "on the device", 1e3 * cell.device_s)
    out.add(*times, more_is_better=False)
