"""Compares throughput with another AFD implementation: vllm-project/afd-plugin, from a checkout.

The peer runs its own recipe for DeepSeek-V2-Lite 2A2F (recipe/gpu/P2pNcclAFDConnector: CUDA graphs,
two micro-batches, TP2 or DP2 on each side), or the same flags with one GPU per side. It uses the
same checkpoint, requests and GPUs as our deployment. PYTHONPATH and a temporary entry point make it
importable, so that nothing has to be installed or built: its GPU path is pure Python. docs/gpu.md
lists its requirements.
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

from afd.devices import CUDA
from afd.errors import AfdError, ConfigError
from afd.host.ports import check_free, held_ports
from afd.topology import visible_gpus
from afd_bench.gpu.common import (
    Budget,
    Report,
    add_model,
    case_of,
    count,
    model_of,
    parser,
    report,
    usable_gpus,
)
from afd_bench.gpu.load import Load, Steady, steady
from afd_bench.gpu.serving import Setup, serve
from afd_bench.gpu.targets import (
    NO_FUSED_ALLREDUCE,
    Afd,
    Colocated,
    Sizes,
    parse,
    share,
    vllm_args,
)
from afd_bench.python_path import python_path
from afd_bench.servers import Server, await_health, server_process

NAME = "afd-plugin"
_PLUGIN = "afd_plugin_checkout"
_RENDEZVOUS_PORT = 6269  # the recipe's port, outside of the ephemeral range
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_STOP_S = 3.0  # short: its FFN ranks do not exit while they wait for work


@dataclass(frozen=True)
class Recipe:
    """A configuration of the peer. tp, dp: of each side. graphs: replays decode steps as graphs."""

    tp: int
    dp: int
    graphs: bool = True

    @property
    def side(self) -> int:
        """GPUs per side."""
        return self.tp * self.dp

    @property
    def name(self) -> str:
        mode = "graph" if self.graphs else "eager"
        return f"{NAME} {self.side}a{self.side}f_{mode}_dbo_dp{self.dp}tp{self.tp}"


RECIPES = {
    "dp2tp1": Recipe(1, 2),
    "dp1tp2": Recipe(2, 1),
    "dp1tp1": Recipe(1, 1),  # the same flags for hosts with two GPUs; not a recipe of the peer
    "eager-dp2tp1": Recipe(1, 2, graphs=False),
    "eager-dp1tp2": Recipe(2, 1, graphs=False),
}


def main(argv: Sequence[str]) -> int:
    options = parser("peer", __doc__, 400.0)
    add_model(options, "deepseek-v2-lite")
    options.add_argument(
        "--peer-checkout",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkout of vllm-project/afd-plugin",
    )
    options.add_argument(
        "--recipes", nargs="+", default=["dp2tp1", "dp1tp2"], choices=RECIPES,
        help="configurations of the peer",
    )  # fmt: skip
    options.add_argument("--target", default="2A2F", help="our topology")
    options.add_argument(
        "--lookahead", action="store_true", help="pipeline.lookahead of our deployment"
    )
    options.add_argument(
        "--wire", default="exact", choices=("exact", "fp8"), help="wire format of our deployment"
    )
    options.add_argument(
        "--depths", type=int, nargs="+", default=[3, 2, 1], choices=(1, 2, 3),
        help="micro-batches in flight of our deployment",
    )  # fmt: skip
    options.add_argument(
        "--batches", type=count, nargs="+", default=[64, 128, 256], help="requests at a time"
    )
    options.add_argument("--context", type=count, default=1024, help="tokens of a prompt")
    options.add_argument("--answer", type=count, default=1_200, help="most tokens of an answer")
    options.add_argument("--window", type=float, default=2.0, help="seconds per cell")
    options.add_argument("--kv-gib", type=float, default=16.0, help="KV cache per GPU and server")
    options.add_argument(
        "--peer-args", nargs="*", default=[], help="arguments for the peer's vLLM processes only"
    )
    options.add_argument("--dry-run", action="store_true", help="only print the peer's commands")
    args = options.parse_args(argv)
    budget = Budget(args.seconds)
    if not (args.peer_checkout / "afd_plugin" / "__init__.py").is_file():
        raise ConfigError(
            f"{args.peer_checkout} has no afd_plugin/__init__.py; give a checkout of"
            " https://github.com/vllm-project/afd-plugin"
        )
    ours = parse(args.target, args.wire)
    if not isinstance(ours, Afd):
        raise ConfigError(f"{args.target} is not a topology; use a deployment such as 2A2F")
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
    model_slice, path = model_of(args, args.model, sizes.length)
    out = report("gpu", args, "peer", argv)
    loads = [
        Load(batch, args.context, sizes.length, model_slice.sizes.vocab, args.seed)
        for batch in args.batches
    ]
    theirs: dict[int, tuple[str, float]] = {}
    measured = 0
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        # Our deployment starts at the same time as the peer and does not use its GPUs until it gets
        # requests. The peer's FFN ranks wait for work in an NCCL kernel, so the peer is stopped
        # before our deployment is measured.
        mine = pool.submit(
            stack.enter_context, serve(ours, Setup(path, sizes, args.device, flags, args.logs))
        )
        for recipe in recipes:
            if not budget.allows(recipe.name, 60.0):
                break
            try:
                with peer(recipe, path, sizes, args, flags, budget.left) as server:
                    wait([mine])
                    print(f"{recipe.name} started, {budget.left:.0f} s left", flush=True)
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
                _record(case_of(args.model, model_slice), ours, depth, load, rate, theirs, out)
    return 0 if theirs and measured else 1


def _check_gpus(device: str, ours: Afd, recipes: Sequence[Recipe]) -> None:
    """Raises ConfigError if the GPUs do not suffice, before anything is written or started."""
    if device == "cpu":
        raise ConfigError("the peer needs GPUs; use --dry-run to print its commands")
    needed, there = max(ours.gpus, *(2 * recipe.side for recipe in recipes)), usable_gpus()
    if needed > there:
        raise ConfigError(
            f"this needs {needed} GPUs and may use {there}; use --recipes dp1tp1 --target"
            " 1A1F, which need two"
        )


def _rate(
    name: str, server: Server, load: Load, window_s: float, depth: int | None = None
) -> Steady | None:
    """Measures one cell; returns None if it fails. depth: depth to set on our deployment."""
    try:
        if depth is not None:
            server.set_depth(depth)
            time.sleep(_PROPAGATION_S)
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
    rendezvous: int,
) -> list[str]:
    """Returns the command line of one side.

    Values are those of the recipe's scripts, except sizes, ports and flags. The graph sizes match
    the batches, as the recipe's README recommends.

    Args:
        role: "attention" or "ffn". port: of its API. rendezvous: port at which the ranks of both
            sides meet.
    """
    gpus = recipe.side
    afd = {
        "role": role,
        "connector": "P2pNcclAFDConnector",
        "host": "127.0.0.1",
        "port": rendezvous,
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
    # Only the attention side has a KV cache to fill.
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
    """Runs both sides of the peer on the first GPUs. Raises AfdError with the end of a log."""
    gpus = recipe.side
    args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="afd-peer-") as folder, contextlib.ExitStack() as stack:
        environment = _environment(args.peer_checkout.absolute(), Path(folder))
        # The connector also uses the next ports, one per FFN rank.
        for port in range(_RENDEZVOUS_PORT, _RENDEZVOUS_PORT + gpus + 1):
            check_free("127.0.0.1", port, "what listens there")
        ports = stack.enter_context(held_ports(["127.0.0.1"] * 2))
        ((variable, value),) = visible_gpus(CUDA, range(2 * gpus), os.environ).items()
        allowed = value.split(",")
        started = {}
        for role, port, first in (("ffn", ports[0], gpus), ("attention", ports[1], 0)):
            argv = command(
                recipe, role, model.absolute(), sizes, args, flags, port, _RENDEZVOUS_PORT
            )
            log = args.logs / f"peer-dp{recipe.dp}tp{recipe.tp}-{role}.log"
            own = {**environment, variable: ",".join(allowed[first : first + gpus])}
            side = server_process(argv, own, log, stop_s=_STOP_S)
            started[role] = (stack.enter_context(side), port, log)
        leader, port, log = started["attention"]
        url = f"http://127.0.0.1:{port}"
        ffn, _, ffn_log = started["ffn"]
        try:
            # Its FFN side never serves /health: that engine only runs the connector's loop.
            await_health(leader, url, log, deadline_s, [(ffn, ffn_log)])
        except AfdError:
            for process in (leader, ffn):
                process.kill()  # else each side waits minutes for the other
            raise
        ranks = recipe.dp if recipe.dp > 1 else 0
        yield Server(url, "model", log, "", leader.pid, ranks)


def _environment(checkout: Path, folder: Path) -> dict[str, str]:
    """Returns an environment in which the checkout is importable and vLLM loads its plugin.

    The plugin gets its own entry-point name, because the peer's name equals that of this project.
    """
    info = folder / "site" / f"{_PLUGIN}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {_PLUGIN}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{_PLUGIN} = afd_plugin:register_afd\n"
    )
    return {
        **os.environ,
        **python_path(folder / "site", checkout),
        "VLLM_PLUGINS": _PLUGIN,
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
