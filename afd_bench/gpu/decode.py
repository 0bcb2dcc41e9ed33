"""Decode throughput per GPU: xAyF deployments against colocated vLLM on as many GPUs.

All servers run the same requests on the same weights, hence with the same routing, and all GPUs
count. Batches grow until every server exceeds the largest --tpot-ms. Prompts are filled instead of
computed (--computed computes them), because the prefill of a cell would take longer than its
measurement.

Rates and times are those of the model slice. The time per token of the whole model ("whole") is an
estimate: the cost model's time outside the layers, plus all layers at the slice's time per layer.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from afd.errors import AfdError, ConfigError
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_kv,
    add_model,
    add_peers,
    add_routing,
    cached_case,
    case_of,
    check_kv,
    count,
    model_of,
    parser,
    report,
    routed_case,
    routing_variables,
    usable_gpus,
)
from afd_bench.gpu.kv import default_gib, spread_kv_bytes
from afd_bench.gpu.load import Load, steady
from afd_bench.gpu.predict import Prediction, predict
from afd_bench.gpu.serving import Setup, running
from afd_bench.gpu.slices import Slice
from afd_bench.gpu.targets import (
    PEER,
    Afd,
    Sizes,
    Target,
    best_for,
    in_modes,
    parse,
    vllm_args,
)
from afd_bench.servers import Server
from afd_planner.facts.hardware import Accelerator, load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import load_model

_ANSWER = 1_200  # tokens: more than the steps of a ramp-up and a window
_CELL_S = 5.0  # estimated time of a cell, with its ramp-up
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_GIB = 2**30


@dataclass(frozen=True)
class Cell:
    """One measurement.

    depth: 0 for colocated vLLM. context: tokens of a prompt. tpot_s: time per token of the slice.
    device_s: device time of a step of ours; the rest of tpot_s is host time between steps. tokens:
    of a request while it was measured, prompt and answer.
    """

    target: Target
    depth: int
    requests: int
    context: int
    tpot_s: float
    predicted: Prediction
    device_s: float = 0.0
    tokens: float = 0.0

    @property
    def per_gpu(self) -> float:
        """Output tokens/s per GPU."""
        return self.requests / self.tpot_s / self.target.gpus

    def whole_s(self, stretch: float) -> float:
        """Estimates the time per token of a model with ``stretch`` times the layers.

        The host time between our steps does not grow with the layers. vLLM's host time is unknown,
        so all of its time outside the predicted rest is scaled.
        """
        device = min(self.device_s or self.tpot_s, self.tpot_s)
        rest = min(self.predicted.rest_s, device)
        return rest + (device - rest) * stretch + (self.tpot_s - device)

    @property
    def name(self) -> str:
        depth = f" depth {self.depth}" if self.depth else ""
        return f"{self.target.label}{depth}"


@dataclass(frozen=True)
class Plan:
    """What to measure.

    tpots_s: limits of the whole model's time per token. stretch: layers of the whole model / those
    of the slice. kv_bytes: KV cache per GPU, averaged over GPUs with and without one. kv: its
    dtype.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    depths: tuple[int, ...]
    tpots_s: tuple[float, ...]
    window_s: float
    stretch: float
    kv_bytes: float
    kv: str = "bfloat16"


def main(argv: Sequence[str]) -> int:
    args = _arguments(argv)
    budget = Budget(args.seconds)
    targets = _targets(args)
    length = max(args.contexts) + args.answer
    model_slice, path = model_of(args, args.model, length)
    model = load_model(str(path))
    plan = Plan(
        tuple(sorted(args.batches)),
        tuple(args.contexts),
        tuple(args.depths),
        tuple(sorted(tpot / 1e3 for tpot in args.tpot_ms)),
        args.window,
        model_slice.full_layers / model_slice.sizes.layers,
        args.kv_gib * _GIB,
        args.kv,
    )
    sizes = Sizes(max(plan.batches), length, args.kv_gib, plan.batches)
    flags = [*vllm_args(args.device, not args.computed, args.kv), *args.vllm_args]
    name = case_of(args.model, model_slice) + cached_case(args) + routed_case(args)
    out = report("gpu", args, "decode", argv)
    variables = routing_variables(args)
    with running(targets, Setup(path, sizes, args.device, flags, args.logs, variables)) as servers:
        print(f"{len(servers)} servers started in {args.seconds - budget.left:.0f} s", flush=True)
        cells = []
        for cell in measure(servers, plan, sizes, model, model_slice, args, budget):
            cells.append(cell)
            _print(cell, plan)
            _record(cell, cells, name, out)
    print(table(cells, plan))
    return 0 if cells else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    options = parser("decode", __doc__, 420.0)
    add_model(options, "qwen3-30b")
    add_routing(options)
    options.add_argument(
        "--gpus", type=count, help="GPUs of every target; default: all of this host"
    )
    options.add_argument(
        "--targets", nargs="+", metavar="NAME",
        help="such as 2A2F, TP4, DP4+EP or TP2xDP2; default: all with --gpus GPUs",
    )  # fmt: skip
    options.add_argument("--wire", default="exact", choices=("exact", "fp8"), help="wire format")
    options.add_argument(
        "--lookahead", nargs="?", const="on", default="off", choices=("off", "on", "both"),
        help="pipeline.lookahead of our deployments; both: each with and without it",
    )  # fmt: skip
    add_peers(options)
    options.add_argument(
        "--contexts", type=count, nargs="+", default=[1024, 4096, 16_384],
        help="tokens of a prompt",
    )  # fmt: skip
    options.add_argument(
        "--batches", type=count, nargs="+", default=[64, 128, 256, 512, 1024],
        help="requests at a time",
    )  # fmt: skip
    options.add_argument(
        "--depths", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3),
        help="micro-batches in flight",
    )  # fmt: skip
    options.add_argument(
        "--tpot-ms", type=float, nargs="+", default=[50.0, 100.0],
        help="limits of the whole model's time per token",
    )  # fmt: skip
    options.add_argument("--window", type=float, default=1.5, help="seconds per cell")
    options.add_argument("--answer", type=count, default=_ANSWER, help="most tokens of an answer")
    options.add_argument(
        "--kv-gib", type=float,
        help="KV cache of a server, per GPU of the server; default: 8, on CPU 0.25",
    )  # fmt: skip
    add_kv(options)
    options.add_argument(
        "--kernels", nargs="+", default=["vllm"], choices=("vllm", "mqa"),
        help="attention.kernel of our deployments; one deployment per value",
    )  # fmt: skip
    options.add_argument(
        "--computed", action="store_true", help="compute prompts instead of filling the cache"
    )
    args = options.parse_args(argv)
    check_kv(args)
    if args.kv_gib is None:
        args.kv_gib = default_gib(args.device)
    return args


def _targets(args: argparse.Namespace) -> list[Target]:
    gpus = args.gpus or usable_gpus()
    if not args.targets and gpus < 2:
        raise ConfigError("a comparison needs two or more GPUs; give --targets for a dry run")
    named = [parse(name, args.wire) for name in args.targets or ()]
    found = named or best_for(gpus, args.wire)
    ahead = {"off": (False,), "on": (True,), "both": (True, False)}[args.lookahead]
    return in_modes(found, ahead, args.peers, args.kernels)


def measure(
    servers: Mapping[Target, Server],
    plan: Plan,
    sizes: Sizes,
    model: ModelSpec,
    model_slice: Slice,
    args: argparse.Namespace,
    budget: Budget,
) -> Iterator[Cell]:
    """Yields cells as they are measured: per context growing batches, per batch every server.

    Every context gets an equal share of the time.
    """
    accelerator = load_accelerator("h200")
    for index, context in enumerate(plan.contexts):
        others = len(plan.contexts) - index - 1
        kept_s = budget.left * others / (others + 1)
        slow: set[Target] = set()
        for requests in plan.batches:
            # Measure all cells of a row or none, so that every rate has a peer at the same batch.
            row = [target for target in servers if target not in slow]
            cost_s = sum(_CELL_S * len(_depths(target, plan)) for target in row)
            if row and not budget.allows(f"batch {requests} context {context}", kept_s + cost_s):
                break
            for target in row:
                what = f"{target.label} batch {requests} context {context}"
                needed = spread_kv_bytes(target, requests, context + args.answer, model, plan.kv)
                if needed > plan.kv_bytes:
                    print(
                        f"{what}: skipped, needs {needed / _GIB:.1f} GiB of KV cache per GPU; raise"
                        " --kv-gib",
                        flush=True,
                    )
                    slow.add(target)
                    continue
                load = Load(requests, context, sizes.length, model_slice.sizes.vocab, args.seed)
                found = list(_of_server(target, servers[target], load, plan, model, accelerator))
                yield from found
                if all(cell.whole_s(plan.stretch) > plan.tpots_s[-1] for cell in found):
                    slow.add(target)


def _of_server(
    target: Target,
    server: Server,
    load: Load,
    plan: Plan,
    model: ModelSpec,
    accelerator: Accelerator,
) -> Iterator[Cell]:
    for depth in _depths(target, plan):
        try:
            if depth:
                server.set_depth(depth)
                time.sleep(_PROPAGATION_S)
            found = steady(server, load, plan.window_s)
        except AfdError as err:
            print(f"{target.label} batch {load.requests}: FAILED: {err}", flush=True)
            continue
        tokens = load.prompt + found.answered
        predicted = predict(
            target, depth or 1, load.requests, tokens, model, accelerator, kv=plan.kv
        )
        yield Cell(
            target,
            depth,
            load.requests,
            load.prompt,
            found.tpot_s,
            predicted,
            found.device_s,
            tokens,
        )


def _depths(target: Target, plan: Plan) -> tuple[int, ...]:
    return plan.depths if isinstance(target, Afd) else (0,)


def best(
    cells: Sequence[Cell], context: int, tpot_s: float, stretch: float, *, ours: bool
) -> Cell | None:
    """Returns the cell with the most tokens/s per GPU whose whole model meets ``tpot_s``."""
    fitting = [
        cell
        for cell in cells
        if cell.context == context
        and isinstance(cell.target, Afd) == ours
        and cell.whole_s(stretch) <= tpot_s
    ]
    return max(fitting, key=lambda cell: cell.per_gpu, default=None)


def _print(cell: Cell, plan: Plan) -> None:
    p = cell.predicted
    device = f", {cell.device_s * 1e3:.2f} on the device" if cell.device_s else ""
    print(
        f"{cell.name} batch {cell.requests} context {cell.context}: {cell.per_gpu:.0f} tokens/s/GPU"
        f", step {cell.tpot_s * 1e3:.2f} ms{device} (whole model"
        f" {cell.whole_s(plan.stretch) * 1e3:.1f} ms); predicted {p.tokens_per_s_per_gpu:.0f},"
        f" {p.tpot_s * 1e3:.2f} ms: {p.words}",
        flush=True,
    )


def _record(cell: Cell, cells: Sequence[Cell], model: str, out: Report) -> None:
    """Records our cells of the same batch and context; their rates, against the peers so far.

    The peers are the best colocated cell and, for an attention kernel of ours, the same deployment
    with vLLM's kernel. Called after each cell, so that records are updated by better peers.
    """
    same = [c for c in cells if (c.requests, c.context) == (cell.requests, cell.context)]
    theirs = [c for c in same if not isinstance(c.target, Afd)]
    colocated = max(theirs, key=lambda c: c.per_gpu, default=None)
    for ours in same:
        if not isinstance(ours.target, Afd):
            continue
        case = f"{model} {ours.name} batch {ours.requests} context {ours.context}"
        peers = {PEER: colocated}
        if ours.target.kernel != "vllm":
            plain = (replace(ours.target, kernel="vllm"), ours.depth)
            found = (c for c in same if (c.target, c.depth) == plain)
            peers["attention.kernel vllm"] = next(found, None)
        for name, peer in peers.items():
            if peer:
                rates = ours.per_gpu, "tokens/s/GPU", name, peer.per_gpu
                out.add(case, "tokens_per_s_per_gpu", *rates)
        if ours.device_s:
            out.add(
                case, "device_step_ms", 1e3 * ours.device_s, "ms", "time per token",
                1e3 * ours.tpot_s, more_is_better=False,
            )  # fmt: skip
        if ours.tokens:
            out.add_tokens(case, ours.tokens, ours.context)


def table(cells: Sequence[Cell], plan: Plan) -> str:
    """Returns Markdown: the best cell of each side per context and time per token."""
    lines = [
        "| context | whole model's TPOT | AFD | tokens/s/GPU | predicted | best colocated |"
        " tokens/s/GPU | predicted | ratio |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for context in plan.contexts:
        for tpot_s in plan.tpots_s:
            sides = [best(cells, context, tpot_s, plan.stretch, ours=o) for o in (True, False)]
            ours, theirs = sides
            ratio = f"{ours.per_gpu / theirs.per_gpu:.2f}" if ours and theirs else ""
            lines.append(
                f"| {context} | {tpot_s * 1e3:g} ms | {_words(ours)} | {_words(theirs)} | {ratio} |"
            )
    return "\n".join(lines)


def _words(cell: Cell | None) -> str:
    if cell is None:
        return "none | |"
    predicted = cell.predicted.tokens_per_s_per_gpu
    return f"{cell.name} batch {cell.requests} | {cell.per_gpu:.0f} | {predicted:.0f}"
