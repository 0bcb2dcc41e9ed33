"""Layers of Step-3 at the report's load per GPU: attention and FFN GPUs, without vLLM's engine.

Load (afd_bench/step3/load.py): 128 rows x 3 micro-batches per attention GPU at 4,096 tokens of
context, FP8; 2,048 rows per micro-batch on the FFN GPU's shard (TP8 x EP2 of 48 experts, 3 per row,
and the shared expert); the bytes per GPU of 2A2F on the wire.

Excluded: collectives among the 8 GPUs of an instance, network between hosts, embedding, LM head and
sampling. All layers have experts; the model has 5 dense layers.
"""

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from afd.errors import AfdError, ConfigError
from afd.metrics.step_trace import StepTrace
from afd.records import gpu_names
from afd_bench.gpu import clocks
from afd_bench.gpu.common import Report, count, parser, report
from afd_bench.gpu.timeline import Step, Summary, chrome, clock_offset, summary
from afd_bench.servers import server_process, tail
from afd_bench.step3.load import (
    AIM_US,
    CORES,
    MODEL_LAYERS,
    PAPER,
    PAPER_BUDGET_US,
    PAPER_TOKENS_PER_S,
    TINY,
    Load,
    lower_bound,
)
from afd_planner.facts.hardware import load_accelerator


@dataclass(frozen=True)
class Result:
    """The measurement, on the first attention GPU.

    us: median time of a step, per layer and micro-batch. longest_us: the same of the longest step.
    jitter: p99 of a step / its median. steps: timed steps. window_s: begin and end of these steps,
    seconds of the epoch. found: stage times of the steps that ran one by one. one: the last one.
    """

    us: float
    jitter: float
    longest_us: float
    steps: int
    found: Summary
    one: Step
    window_s: tuple[float, float]


def main(argv: Sequence[str]) -> int:
    options = parser("step3", __doc__, 120.0)
    options.add_argument(
        "--pairs", type=int, choices=(1, 2), help="attention-FFN pairs of GPUs; default: all"
    )
    options.add_argument(
        "--layers", type=count, help=f"layers of a step; default: {MODEL_LAYERS}, on cpu 4"
    )
    options.add_argument(
        "--distinct", type=count, default=4, help="layers with own weights, used in turn"
    )
    options.add_argument(
        "--kv", default="fp8", choices=PAPER_TOKENS_PER_S, help="dtype of cache and attention"
    )
    options.add_argument(
        "--core", choices=CORES, help="attention kernel; default: mqa on fp8, fa3 on bf16"
    )
    options.add_argument("--steps", type=count, help="timed steps; default: 500, on cpu 20")
    options.add_argument(
        "--trace", type=Path, default=Path("logs/gpu/traces/step3.json"), metavar="FILE",
        help="Perfetto trace of one step",
    )  # fmt: skip
    options.add_argument(
        "--clocks", action=argparse.BooleanOptionalAction, default=True,
        help="sample the GPUs' clocks and power with nvidia-smi, if it is installed",
    )  # fmt: skip
    args = options.parse_args(argv)
    dry = args.device == "cpu"
    load, layers, steps = (TINY, 4, 20) if dry else (PAPER, MODEL_LAYERS, 500)
    core = args.core or ("mqa" if args.kv == "fp8" else "fa3")
    load = replace(load, kv_element=1 if args.kv == "fp8" else 2, core=core)
    layers, steps = args.layers or layers, args.steps or steps
    pairs = args.pairs or (1 if dry else min(2, len(gpu_names()) // 2))
    if pairs < 1 or (not dry and len(gpu_names()) < 2 * pairs):
        raise ConfigError("the Step-3 slice needs two NVIDIA GPUs; use --device cpu for a dry run")
    samples = args.logs / "step3-clocks.csv"
    args.logs.mkdir(parents=True, exist_ok=True)
    watching = clocks.sampled(samples) if args.clocks else contextlib.nullcontext(False)
    with watching as sampling:
        result = run(
            load, layers, steps, pairs, args.distinct, args.device, args.seconds, args.logs
        )
    print(summary_text(load, result, layers))
    if sampling:
        print(
            clocks.summary_text(clocks.parse(samples.read_text(errors="replace")), *result.window_s)
        )
        print(f"{samples} written; steps were timed from {_clock(result.window_s[0])}")
    name = "tiny load" if dry else "step-3 2A2F load"
    _record(name, load, result, layers, pairs, report("step3", args, "step3", argv))
    args.trace.parent.mkdir(parents=True, exist_ok=True)
    args.trace.write_text(json.dumps(chrome(result.one, "attention-0")), encoding="utf-8")
    print(f"{args.trace} written; open it at https://ui.perfetto.dev")
    return 0


def run(
    load: Load,
    layers: int,
    steps: int,
    pairs: int,
    distinct: int,
    device: str,
    timeout_s: float,
    logs: Path,
) -> Result:
    """Measures with one process per GPU. Raises AfdError if one fails or ``timeout_s`` passes."""
    settings = {
        "load": asdict(load),
        "layers": layers,
        "steps": steps,
        "pairs": pairs,
        "distinct": distinct,
        "device": device,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_MODULE_LOADING": "EAGER"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "side"
        argv = [
            sys.executable,
            "-m",
            "afd_bench.step3.sides_torch",
            json.dumps(settings),
            str(out),
        ]
        log = logs / "step3.log"
        with server_process(argv, environment, log) as leader:
            try:
                status = leader.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise AfdError(
                    f"the Step-3 slice took over {timeout_s:g} s; raise --seconds:\n{tail(log)}"
                ) from None
        if status != 0:
            raise AfdError(f"a process of the Step-3 slice failed:\n{tail(log, 40)}")
        sides = [
            json.loads(Path(f"{out}.{rank}").read_text(encoding="utf-8"))
            for rank in range(2 * pairs)
        ]
    return result(load, layers, pairs, sides)


def result(load: Load, layers: int, pairs: int, sides: Sequence[dict[str, Any]]) -> Result:
    """Summarises a run. sides: output of each process, attention GPUs first."""
    times = sorted(sides[0]["times"])
    middle = statistics.median(times)
    each = 1e6 / (layers * load.depth)
    traces = [[StepTrace.from_plain(step) for step in side["steps"]] for side in sides]
    steps = []
    for number, mine in enumerate(traces[0]):
        ffn = {f"ffn-{j}": traces[pairs + j][number] for j in range(pairs)}
        clocks = {name: clock_offset(mine, theirs) for name, theirs in ffn.items()}
        steps.append(
            Step(
                mine,
                ffn,
                {name: offset for name, (offset, _) in clocks.items()},
                {name: error for name, (_, error) in clocks.items()},
            )
        )
    return Result(
        middle * each,
        times[int(0.99 * (len(times) - 1))] / middle,
        times[-1] * each,
        len(times),
        summary(steps),
        steps[-1],
        tuple(sides[0]["window_s"]),
    )


def summary_text(load: Load, r: Result, layers: int) -> str:
    """Returns the measurement as text, with an extrapolation to the report's deployment."""
    least, f = lower_bound(load, load_accelerator("h200")), r.found
    clocks = max(r.one.errors_ns.values()) / 1e3
    return (
        f"{r.us:.1f} us per layer and micro-batch (median of {r.steps} steps of {layers} layers;"
        f" p99/p50 {r.jitter:.3f}, longest {r.longest_us:.1f} us); budget {PAPER_BUDGET_US:g}, aim"
        f" {AIM_US:g}\n"
        f"stages: attention {f.attention_us:.1f} us (at peak rates {least.attention_us:.0f}), to"
        f" FFN {f.to_ffn_us:.1f}, FFN {f.ffn_us:.1f} (at peak rates {least.ffn_us:.0f}), back"
        f" {f.to_attention_us:.1f}; efficiency {f.efficiency:.3f}, clocks within {clocks:.1f} us\n"
        f"extrapolates to {load.tokens_per_s_per_gpu(r.us):.0f} tokens/s/GPU on {load.gpus} GPUs,"
        f" {load.kv} cache (report: {PAPER_TOKENS_PER_S[load.kv]:g}), excluding collectives,"
        " network, LM head and sampling"
    )


def _clock(epoch_s: float) -> str:
    """Returns the local time of day in milliseconds, in nvidia-smi's format."""
    return datetime.datetime.fromtimestamp(epoch_s).strftime("%H:%M:%S.%f")[:-3]


def _record(name: str, load: Load, r: Result, layers: int, pairs: int, out: Report) -> None:
    case = f"{name}, {pairs} + {pairs} GPUs, {layers} layers, depth {load.depth}"
    case += "" if load.kv == "fp8" else f", {load.kv} cache"
    case += "" if load.core == "fa3" else f", core {load.core}"
    out.add(
        case, "us_per_layer_microbatch", r.us, "us", "Step-3 report, budget", PAPER_BUDGET_US,
        more_is_better=False,
    )  # fmt: skip
    rate = load.tokens_per_s_per_gpu(r.us)
    paper = PAPER_TOKENS_PER_S[load.kv]
    out.add(case, "tokens_per_s_per_gpu", rate, "tokens/s/GPU", "Step-3 report", paper)
    out.add(case, "efficiency", r.found.efficiency, "fraction of the step", "aim", 0.97)
    out.add(case, "step_p99_over_p50", r.jitter, "x", "aim", 1.02, more_is_better=False)
    least = lower_bound(load, load_accelerator("h200"))
    for metric, value, peak in (
        ("attention_us", r.found.attention_us, least.attention_us),
        ("ffn_us", r.found.ffn_us, least.ffn_us),
    ):
        out.add(case, metric, value, "us", "peak rates", peak, more_is_better=False)
