"""Decode throughput per GPU: xAyF deployments against colocated vLLM on as many GPUs.

All servers run the same requests on the same weights, so on the same routing, and all GPUs count.
Batches rise until no server is below the longest time per token that is asked for. Prompts are
filled instead of computed (--computed computes them), because a prefill of every cell would take
longer than its measurement. Rates and times are of the slice. What the whole model's time per token
would be ("whole") is an estimate: the cost model's time outside of the layers, and all layers at
the pace of the slice's.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from afd.bench.gpu.common import (
    Budget,
    Report,
    add_model,
    add_peers,
    case_of,
    count,
    model_of,
    parser,
    report,
)
from afd.bench.gpu.kv import default_gib, spread_kv_bytes
from afd.bench.gpu.load import Load, steady
from afd.bench.gpu.predict import Prediction, predict
from afd.bench.gpu.slices import Slice
from afd.bench.gpu.targets import (
    PEER,
    Afd,
    Sizes,
    Target,
    best_for,
    in_modes,
    parse,
    running,
    vllm_args,
)
from afd.bench.records import gpu_names
from afd.bench.servers import Server
from afd.errors import AfdError, ConfigError
from afd.planner.facts.hardware import Accelerator, load_accelerator
from afd.planner.facts.model import ModelSpec
from afd.planner.facts.model_hf import load_model

_ANSWER = 1_200  # tokens: more than the steps of a ramp and a window
_CELL_S = 5.0  # of one, with its ramp
_SETTLE_S = 0.3  # the depth reaches the instances with the next message of the control plane
_GIB = 2**30


@dataclass(frozen=True)
class Cell:
    """One measurement. depth: 0 for colocated vLLM. tpot_s: of the slice. device_s: of a step of
    ours on the device; the rest of tpot_s is what its host needs between steps."""

    target: Target
    depth: int
    requests: int
    context: int
    tpot_s: float
    predicted: Prediction
    device_s: float = 0.0

    @property
    def per_gpu(self) -> float:
        """Output tokens per second and GPU."""
        return self.requests / self.tpot_s / self.target.gpus

    def whole_s(self, stretch: float) -> float:
        """Estimated time per token of a model of ``stretch`` times the layers. What the host adds
        to a step of ours does not grow with them; of vLLM's it is not known."""
        device = min(self.device_s or self.tpot_s, self.tpot_s)
        rest = min(self.predicted.rest_s, device)
        return rest + (device - rest) * stretch + (self.tpot_s - device)

    @property
    def name(self) -> str:
        depth = f" depth {self.depth}" if self.depth else ""
        return f"{self.target.label}{depth}"


@dataclass(frozen=True)
class Plan:
    """tpots_s: longest times per token that count, of the whole model. stretch: layers of the whole
    model over the slice's. kv_bytes: cache per GPU, those without one counted too. kv: its type."""

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
    piece, path = model_of(args, args.model, length)
    model = load_model(str(path))
    plan = Plan(
        tuple(sorted(args.batches)),
        tuple(args.contexts),
        tuple(args.depths),
        tuple(sorted(tpot / 1e3 for tpot in args.tpot_ms)),
        args.window,
        piece.full_layers / piece.sizes.layers,
        args.kv_gib * _GIB,
        args.kv,
    )
    sizes = Sizes(max(plan.batches), length, args.kv_gib, plan.batches)
    flags = [*vllm_args(args.device, not args.computed, args.kv), *args.vllm_args]
    cache = "" if args.kv == "bfloat16" else f" {args.kv} cache"
    out = report("gpu", args, "decode", argv)
    with running(targets, path, sizes, args.device, flags, args.logs) as servers:
        print(f"{len(servers)} servers up after {args.seconds - budget.left:.0f} s", flush=True)
        cells = []
        for cell in measure(servers, plan, sizes, model, piece, args, budget):
            cells.append(cell)
            _tell(cell, plan)
            _record(cell, cells, case_of(args.model, piece) + cache, out)
    print(table(cells, plan))
    return 0 if cells else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    made = parser("decode", __doc__, 420.0)
    add_model(made, "qwen3-30b")
    made.add_argument("--gpus", type=count, help="of every target; default: all of this host")
    made.add_argument(
        "--targets", nargs="+", metavar="NAME", help="2A2F TP4 DP4+EP TP2xDP2; default: all"
    )
    made.add_argument("--wire", default="exact", choices=("exact", "fp8"))
    made.add_argument(
        "--lookahead", nargs="?", const="on", default="off", choices=("off", "on", "both"),
        help="pipeline.lookahead of our deployments; both: each with and without it",
    )  # fmt: skip
    add_peers(made)
    made.add_argument("--contexts", type=count, nargs="+", default=[1024, 4096, 16_384])
    made.add_argument("--batches", type=count, nargs="+", default=[64, 128, 256, 512, 1024])
    made.add_argument("--depths", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3))
    made.add_argument("--tpot-ms", type=float, nargs="+", default=[50.0, 100.0])
    made.add_argument("--window", type=float, default=1.5, help="seconds per cell")
    made.add_argument("--answer", type=count, default=_ANSWER, help="most tokens of an answer")
    made.add_argument(
        "--kv-gib", type=float, help="KV cache of a server, per GPU it has; default: 8, on CPU 0.25"
    )
    made.add_argument(
        "--kv", default="bfloat16", choices=("bfloat16", "fp8"), help="of every server's KV cache"
    )
    made.add_argument(
        "--kernels", nargs="+", default=["vllm"], choices=("vllm", "mqa"),
        help="attention.kernel of our deployments, one deployment each",
    )  # fmt: skip
    made.add_argument("--computed", action="store_true", help="compute prompts, fill none")
    args = made.parse_args(argv)
    if args.kv_gib is None:
        args.kv_gib = default_gib(args.device)
    return args


def _targets(args: argparse.Namespace) -> list[Target]:
    gpus = args.gpus or len(gpu_names())
    if not args.targets and gpus < 2:
        raise ConfigError("a comparison needs two GPUs or more; name --targets for a dry run")
    named = [parse(name, args.wire) for name in args.targets or ()]
    found = named or best_for(gpus, args.wire)
    ahead = {"off": (False,), "on": (True,), "both": (True, False)}[args.lookahead]
    return in_modes(found, ahead, args.peers, args.kernels)


def measure(
    servers: Mapping[Target, Server],
    plan: Plan,
    sizes: Sizes,
    model: ModelSpec,
    piece: Slice,
    args: argparse.Namespace,
    budget: Budget,
) -> Iterator[Cell]:
    """Cells as they are measured: per context rising batches, per batch every server in turn.
    Contexts get equal shares of the time."""
    accelerator = load_accelerator("h200")
    for index, context in enumerate(plan.contexts):
        others = len(plan.contexts) - index - 1
        kept_s = budget.left * others / (others + 1)
        slow: set[Target] = set()
        for requests in plan.batches:
            # All of a row or none: a rate without its peer's would be compared to a smaller batch.
            row = [target for target in servers if target not in slow]
            cost_s = sum(_CELL_S * len(_depths(target, plan)) for target in row)
            if row and not budget.allows(f"batch {requests} context {context}", kept_s + cost_s):
                break
            for target in row:
                what = f"{target.label} batch {requests} context {context}"
                needed = spread_kv_bytes(target, requests, context + args.answer, model, plan.kv)
                if needed > plan.kv_bytes:
                    print(
                        f"{what}: its KV cache of {needed / _GIB:.1f} GiB per GPU is over --kv-gib",
                        flush=True,
                    )
                    slow.add(target)
                    continue
                load = Load(requests, context, sizes.length, piece.sizes.vocab, args.seed)
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
                time.sleep(_SETTLE_S)
            found = steady(server, load, plan.window_s)
        except AfdError as err:
            print(f"{target.label} batch {load.requests}: FAILED: {err}", flush=True)
            continue
        said = predict(
            target, depth or 1, load.requests, load.prompt, model, accelerator, kv=plan.kv
        )
        yield Cell(target, depth, load.requests, load.prompt, found.tpot_s, said, found.device_s)


def _depths(target: Target, plan: Plan) -> tuple[int, ...]:
    return plan.depths if isinstance(target, Afd) else (0,)


def best(
    cells: Sequence[Cell], context: int, tpot_s: float, stretch: float, *, ours: bool
) -> Cell | None:
    """The cell with the most tokens per GPU whose whole model would keep to the time per token."""
    fitting = [
        cell
        for cell in cells
        if cell.context == context
        and isinstance(cell.target, Afd) == ours
        and cell.whole_s(stretch) <= tpot_s
    ]
    return max(fitting, key=lambda cell: cell.per_gpu, default=None)


def _tell(cell: Cell, plan: Plan) -> None:
    said = cell.predicted
    device = f", {cell.device_s * 1e3:.2f} on the device" if cell.device_s else ""
    print(
        f"{cell.name} batch {cell.requests} context {cell.context}: {cell.per_gpu:.0f} tokens/s/GPU"
        f", step {cell.tpot_s * 1e3:.2f} ms{device} (whole"
        f" {cell.whole_s(plan.stretch) * 1e3:.1f} ms); predicted {said.tokens_per_s_per_gpu:.0f},"
        f" {said.tpot_s * 1e3:.2f} ms: {said.words}",
        flush=True,
    )


def _record(cell: Cell, cells: Sequence[Cell], model: str, out: Report) -> None:
    """Ours against the best colocated cell of the same batch and context known so far, and one with
    a kernel of ours against the same with vLLM's; again when a peer's cell comes."""
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
        if any(peers.values()) and ours.device_s:
            out.add(
                case, "device_step_ms", 1e3 * ours.device_s, "ms", "time per token",
                1e3 * ours.tpot_s, more_is_better=False,
            )  # fmt: skip


def table(cells: Sequence[Cell], plan: Plan) -> str:
    """Markdown: the best of either side per context and time per token, losing cells too."""
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
    said = cell.predicted.tokens_per_s_per_gpu
    return f"{cell.name} batch {cell.requests} | {cell.per_gpu:.0f} | {said:.0f}"
