"""The same requests on the live peer: vllm-project/afd-plugin, from a checkout of it.

The peer runs its own recipe for DeepSeek-V2-Lite 2A2F (its recipe/gpu/P2pNcclAFDConnector: graphs,
two micro-batches, TP2 or DP2 on either side; or its flags on one GPU a side) on the checkpoint, the
requests and the GPUs that ours runs on. It is found by PYTHONPATH and by an entry point written
beside it, so that nothing has to be installed or built: its GPU path is Python only. docs/gpu.md
says what it needs.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from afd.bench.gpu.common import (
    Budget,
    Report,
    add_model,
    case_of,
    count,
    model_of,
    parser,
    report,
)
from afd.bench.gpu.load import Load, Steady, steady
from afd.bench.gpu.targets import (
    NO_FUSED_ALLREDUCE,
    Afd,
    Colocated,
    Sizes,
    parse,
    serve,
    share,
    vllm_args,
)
from afd.bench.records import gpu_names
from afd.bench.servers import Server, await_health, server_process
from afd.errors import AfdError, ConfigError
from afd.launch.ports import check_free, held_ports
from afd.topology import visible_gpus

NAME = "afd-plugin"
_PLUGIN = "afd_plugin_checkout"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MEETING = 6269  # the recipe's port: none that a system gives to anybody else
_SETTLE_S = 0.3
_STOP_S = 3.0  # its FFN ranks do not end while they wait for work


@dataclass(frozen=True)
class Recipe:
    """tp, dp: of either side; together the GPUs of a side. graphs: decode steps as graphs."""

    tp: int
    dp: int
    graphs: bool = True

    @property
    def side(self) -> int:
        """GPUs of either side."""
        return self.tp * self.dp

    @property
    def name(self) -> str:
        mode = "graph" if self.graphs else "eager"
        return f"{NAME} {self.side}a{self.side}f_{mode}_dbo_dp{self.dp}tp{self.tp}"


RECIPES = {
    "dp2tp1": Recipe(1, 2),
    "dp1tp2": Recipe(2, 1),
    "dp1tp1": Recipe(1, 1),  # the same flags for hosts of two GPUs; not among its own scripts
    "eager-dp2tp1": Recipe(1, 2, graphs=False),
    "eager-dp1tp2": Recipe(2, 1, graphs=False),
}


def main(argv: Sequence[str]) -> int:
    made = parser("peer", __doc__, 400.0)
    add_model(made, "deepseek-v2-lite")
    made.add_argument(
        "--peer-checkout",
        type=Path,
        required=True,
        metavar="DIR",
        help="of vllm-project/afd-plugin",
    )
    made.add_argument("--recipes", nargs="+", default=["dp2tp1", "dp1tp2"], choices=RECIPES)
    made.add_argument("--target", default="2A2F", help="of ours")
    made.add_argument("--lookahead", action="store_true", help="pipeline.lookahead of ours")
    made.add_argument("--wire", default="exact", choices=("exact", "fp8"))
    made.add_argument("--depths", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3))
    made.add_argument("--batches", type=count, nargs="+", default=[64, 128, 256])
    made.add_argument("--context", type=count, default=1024)
    made.add_argument("--answer", type=count, default=1_200, help="most tokens of an answer")
    made.add_argument("--window", type=float, default=2.0, help="seconds per cell")
    made.add_argument("--kv-gib", type=float, default=16.0, help="KV cache per GPU and server")
    made.add_argument("--peer-args", nargs="*", default=[], help="for the peer's vLLMs only")
    made.add_argument("--dry-run", action="store_true", help="print the peer's commands and end")
    args = made.parse_args(argv)
    budget = Budget(args.seconds)
    if not (args.peer_checkout / "afd_plugin" / "__init__.py").is_file():
        raise ConfigError(
            f"{args.peer_checkout} has no afd_plugin/__init__.py; give a checkout of"
            " https://github.com/vllm-project/afd-plugin"
        )
    ours = parse(args.target, args.wire)
    if not isinstance(ours, Afd):
        raise ConfigError(f"{args.target} is no topology; name a deployment such as 2A2F")
    ours = replace(ours, lookahead=args.lookahead)
    recipes = [RECIPES[name] for name in args.recipes]
    batches = tuple(args.batches)
    sizes = Sizes(max(batches), args.context + args.answer, args.kv_gib, batches)
    flags = [*vllm_args(args.device, True), *args.vllm_args]
    if args.dry_run:
        for recipe in recipes:
            for role in ("ffn", "attention"):
                print(" ".join(command(recipe, role, Path("MODEL"), sizes, args, flags, 1, 2)))
        return 0
    _check_gpus(args.device, ours, recipes)
    piece, path = model_of(args, args.model, sizes.length)
    out = report("gpu", args, "peer", argv)
    loads = [
        Load(batch, args.context, sizes.length, piece.sizes.vocab, args.seed)
        for batch in args.batches
    ]
    theirs: dict[int, tuple[str, float]] = {}
    measured = 0
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        # Ours starts beside the peer and leaves its GPUs alone until it is asked. The peer's FFN
        # ranks wait for work in an NCCL kernel, so they have ended before ours is measured.
        mine = pool.submit(
            stack.enter_context, serve(ours, path, sizes, args.device, flags, args.logs)
        )
        for recipe in recipes:
            if not budget.allows(recipe.name, 60.0):
                break
            try:
                with peer(recipe, path, sizes, args, flags, budget.left) as server:
                    wait([mine])
                    print(f"{recipe.name} up, {budget.left:.0f} s left", flush=True)
                    for load in loads:
                        if not budget.allows(f"{recipe.name} batch {load.requests}", 5.0):
                            break
                        rate = _rate(recipe.name, server, load, args.window)
                        per_gpu = rate.tokens_per_s / (2 * recipe.side) if rate else 0.0
                        if per_gpu > theirs.get(load.requests, ("", 0.0))[1]:
                            theirs[load.requests] = (recipe.name, per_gpu)
            except AfdError as err:
                print(f"{recipe.name}: FAILED: {err}", flush=True)
        try:
            server = mine.result()
        except AfdError as err:
            print(f"{ours.label}: FAILED: {err}", flush=True)
            return 1
        for load, depth in product(loads, args.depths):
            if not budget.allows(f"{ours.label} depth {depth} batch {load.requests}"):
                break
            rate = _rate(f"{ours.label} depth {depth}", server, load, args.window, depth)
            if rate:
                measured += 1
                _record(case_of(args.model, piece), ours, depth, load, rate, theirs, out)
    return 0 if theirs and measured else 1


def _check_gpus(device: str, ours: Afd, recipes: Sequence[Recipe]) -> None:
    """Raise ConfigError before a checkpoint is written and servers are started for nothing."""
    if device == "cpu":
        raise ConfigError("the peer runs on GPUs; --dry-run prints its commands")
    needed, there = max(ours.gpus, *(2 * recipe.side for recipe in recipes)), len(gpu_names())
    if needed > there:
        raise ConfigError(
            f"this takes {needed} GPUs and the host has {there}; --recipes dp1tp1 --target 1A1F"
            " take two"
        )


def _rate(
    name: str, server: Server, load: Load, window_s: float, depth: int | None = None
) -> Steady | None:
    """depth: to be set before; of ours only."""
    try:
        if depth is not None:
            server.set_depth(depth)
            time.sleep(_SETTLE_S)
        found = steady(server, load, window_s)
    except AfdError as err:
        print(f"{name} batch {load.requests}: FAILED: {err}", flush=True)
        return None
    print(
        f"{name} batch {load.requests} context {load.prompt}: {found.tokens_per_s:.0f} tokens/s,"
        f" {found.tpot_s * 1e3:.2f} ms per token"
        + (f", {found.device_s * 1e3:.2f} of it on the device" if found.device_s else ""),
        flush=True,
    )
    return found


def _record(
    model: str,
    ours: Afd,
    depth: int,
    load: Load,
    rate: Steady,
    theirs: dict[int, tuple[str, float]],
    out: Report,
) -> None:
    if load.requests not in theirs:
        return
    name, per_gpu = theirs[load.requests]
    case = f"{model} {ours.label} depth {depth} batch {load.requests} context {load.prompt}"
    case += f" against {name.removeprefix(NAME).strip()}"
    mine = rate.tokens_per_s / ours.gpus
    out.add(case, "tokens_per_s_per_gpu", mine, "tokens/s/GPU", NAME, per_gpu)


def command(
    recipe: Recipe,
    role: str,
    model: Path,
    sizes: Sizes,
    args: argparse.Namespace,
    flags: Sequence[str],
    port: int,
    meeting: int,
) -> list[str]:
    """argv of one side. Values of the recipe's own scripts, but for sizes, ports and flags; its
    graph sizes are adjusted to the batches, as the recipe's README says to.

    port: of its API. meeting: where the ranks of both sides meet.
    """
    gpus = recipe.side
    afd = {
        "role": role,
        "connector": "P2pNcclAFDConnector",
        "host": "127.0.0.1",
        "port": meeting,
        "num_attention_ranks": gpus,
        "num_ffn_ranks": gpus,
    }
    batches = sorted({-(-batch // recipe.dp) for batch in args.batches})
    graphs: dict[str, object] = {
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": batches,
    }
    if recipe.tp > 1:
        graphs["pass_config"] = NO_FUSED_ALLREDUCE
    requests = share(Colocated(recipe.tp, recipe.dp), sizes.requests)
    argv = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(model),
        "--served-model-name=model",
        "--host=127.0.0.1",
        f"--port={port}",
        "--dtype=bfloat16",
        f"--data-parallel-size={recipe.dp}",
        f"--tensor-parallel-size={recipe.tp}",
        "--enable-expert-parallel",
        f"--additional-config={json.dumps({'afd': afd})}",
        f"--max-model-len={sizes.length}",
        f"--max-num-seqs={requests}",
        f"--max-num-batched-tokens={requests}",
        f"--kv-cache-memory-bytes={int(sizes.kv_gib * 2**30)}",
        "--enable-dbo",
        "--dbo-decode-token-threshold=2",
        "--dbo-prefill-token-threshold=12",
        "--disable-uvicorn-access-log",
    ]
    if recipe.graphs:
        argv.append(f"--max-cudagraph-capture-size={max(batches)}")
        argv.append(f"--compilation-config={json.dumps(graphs)}")
    else:
        argv.append("--enforce-eager")
    if role == "attention":
        return [*argv, f"--api-server-count={gpus}", *flags, *args.peer_args]
    # Filled prompts are the attention side's business: the FFN side has no cache.
    return [*argv, *(f for f in flags if "kv-transfer" not in f), *args.peer_args]


@contextlib.contextmanager
def peer(
    recipe: Recipe,
    model: Path,
    sizes: Sizes,
    args: argparse.Namespace,
    flags: Sequence[str],
    deadline_s: float,
) -> Iterator[Server]:
    """Both sides of the peer, on the first GPUs. Raises AfdError with the end of a log."""
    gpus = recipe.side
    args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="afd-peer-") as folder, contextlib.ExitStack() as stack:
        environment = _environment(args.peer_checkout.absolute(), Path(folder))
        # The connector takes the ports after the first as well, one per FFN rank.
        for port in range(_MEETING, _MEETING + gpus + 1):
            check_free("127.0.0.1", port, "what listens there")
        ports = stack.enter_context(held_ports(["127.0.0.1"] * 2))
        allowed = visible_gpus(range(2 * gpus), os.environ.get(_VISIBLE)).split(",")
        started = {}
        for role, port, first in (("ffn", ports[0], gpus), ("attention", ports[1], 0)):
            argv = command(recipe, role, model.absolute(), sizes, args, flags, port, _MEETING)
            log = args.logs / f"peer-dp{recipe.dp}tp{recipe.tp}-{role}.log"
            own = {**environment, _VISIBLE: ",".join(allowed[first : first + gpus])}
            side = server_process(argv, own, log, stop_s=_STOP_S)
            started[role] = (stack.enter_context(side), port, log)
        leader, port, log = started["attention"]
        url = f"http://127.0.0.1:{port}"
        ffn, _, ffn_log = started["ffn"]
        try:
            # Its FFN side never answers: the engine there does nothing but the connector's loop.
            await_health(leader, url, log, deadline_s, [(ffn, ffn_log)])
        except AfdError:
            for process in (leader, ffn):
                process.kill()  # one side waits for the other for minutes
            raise
        ranks = recipe.dp if recipe.dp > 1 else 0
        yield Server(url, "model", log, "", leader.pid, ranks)


def _environment(checkout: Path, folder: Path) -> dict[str, str]:
    """The checkout importable, and vLLM's plugin loader told of it under a name of its own: this
    project's plugin is called as the peer's is."""
    info = folder / "site" / f"{_PLUGIN}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{_PLUGIN} = afd_plugin:register_afd\n"
    )
    path = [str(folder / "site"), str(checkout), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "VLLM_PLUGINS": _PLUGIN,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
