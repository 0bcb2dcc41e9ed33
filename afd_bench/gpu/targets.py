"""What `afd bench gpu` compares: xAyF deployments, and colocated vLLM on as many GPUs. Pure."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal, TypedDict

from afd.errors import ConfigError
from afd_bench.cases import AUTO
from afd_bench.stand_in_nic import PORTS

START_S = 240.0
PEER = "vllm colocated"
DEFAULT_BACKEND = "auto"
"""Default of ffn.backend (afd/config/sections.py)."""
FILLED = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.1},
}
"""vLLM's connector that fills a prompt's KV cache with random numbers instead of computing it."""
FILLED_FP8 = {**FILLED, "kv_connector_extra_config": {"fill_mean": 0x38}}
"""The same for an FP8 cache, filled with 1.0 (0x38): the connector treats the cache as bytes and
cannot draw random bytes."""


@dataclass(frozen=True)
class Afd:
    """An xAyF deployment.

    Each attention instance has one GPU and each FFN instance ``tp`` GPUs, or all of them share
    ``shared`` GPUs. The keys of the deployment file are: wire (wire.format), graphs
    (pipeline.graphs), stage_every (metrics.stage_every), lookahead (pipeline.lookahead), kernel
    (attention.kernel), fused (attention.fused), weights (ffn.weights), dummy (ffn.load is dummy),
    backend (ffn.backend), over (transport.backend), nic (transport.verbs.library, of a libibverbs
    without hardware).
    """

    attention: int
    ffn: int
    wire: str = "exact"
    graphs: bool = True
    stage_every: int = 0
    lookahead: bool = False
    shared: int | None = None
    tp: int = 1
    kernel: str = "vllm"
    fused: Literal["auto"] | bool = "auto"
    weights: str = "auto"
    dummy: bool = False
    backend: str = DEFAULT_BACKEND
    over: str = AUTO
    nic: str = ""

    @property
    def gpus(self) -> int:
        return self.attention + self.ffn * self.tp

    @property
    def replicas(self) -> int:
        """Number of schedulers among which the requests are distributed."""
        return self.attention

    @property
    def kv_gpus(self) -> int:
        """Number of GPUs that share the KV cache of one scheduler."""
        return 1

    @property
    def name(self) -> str:
        return f"{self.attention}A{self.ffn}F" + (f"-tp{self.tp}" if self.tp > 1 else "")

    @property
    def label(self) -> str:
        """Name in the cases of records, such as ``2A2F fp8`` or ``1A1F exact eager``."""
        ahead = " lookahead" if self.lookahead else ""
        eager = "" if self.graphs else " eager"
        shared = f" on {self.shared} GPUs" if self.shared else ""
        kernel = f" {self.kernel}" if self.kernel != "vllm" else ""
        fused = "" if self.fused == "auto" else f" fused {'on' if self.fused else 'off'}"
        dummy = " dummy experts" if self.dummy else ""
        backend = f" backend {self.backend}" if self.backend != DEFAULT_BACKEND else ""
        over = f" over {self.over}" if self.over != AUTO else ""
        return f"{self.name} {self.wire}{kernel}{fused}{ahead}{eager}{shared}{dummy}{backend}{over}"


def fitted(target: Afd, gpus: int) -> Afd:
    """Returns the target with shared GPUs if it needs more than ``gpus`` GPUs."""
    return replace(target, shared=gpus) if 0 < gpus < target.gpus else target


@dataclass(frozen=True)
class Colocated:
    """Colocated vLLM: dp replicas of tp GPUs each.

    With more than one replica the experts are distributed over all GPUs (expert parallelism). mode:
    ``compiled`` is vLLM's default of torch.compile and CUDA graphs, which takes longest to start;
    ``graphs`` uses only CUDA graphs of decode steps. Both capture only decode steps, as only these
    are timed; ``default`` leaves that to vLLM too.
    """

    tp: int
    dp: int = 1
    mode: Literal["compiled", "graphs", "eager", "default"] = "compiled"

    @property
    def gpus(self) -> int:
        return self.tp * self.dp

    @property
    def replicas(self) -> int:
        return self.dp

    @property
    def kv_gpus(self) -> int:
        return self.tp

    @property
    def name(self) -> str:
        if self.dp == 1:
            return f"TP{self.tp}"
        return f"DP{self.dp}+EP" if self.tp == 1 else f"TP{self.tp}xDP{self.dp}"

    @property
    def label(self) -> str:
        return self.name + ("" if self.mode == "compiled" else f" {self.mode}")


Target = Afd | Colocated


def parse(text: str, wire: str = "exact") -> Target:
    """Parses ``2A2F``, ``1A1F-tp2`` (two GPUs per FFN instance), ``TP4``, ``DP4+EP``, ``TP2xDP2``.

    Raises:
        ConfigError: ``text`` is none of these.
    """
    if found := re.fullmatch(r"([1-9])A([1-9])F(?:-tp([1-8]))?", text):
        return Afd(int(found[1]), int(found[2]), wire, tp=int(found[3] or 1))
    if found := re.fullmatch(r"TP([1-8])(?:xDP([1-8]))?", text):
        return Colocated(int(found[1]), int(found[2] or 1))
    if found := re.fullmatch(r"DP([1-8])\+EP", text):
        return Colocated(1, int(found[1]))
    raise ConfigError(f"{text!r} is not a target; use 2A2F, 1A1F-tp2, TP4, DP4+EP or TP2xDP2")


def best_for(gpus: int, wire: str = "exact") -> list[Target]:
    """Returns every topology of ``gpus`` GPUs (at least two), deployments before vLLM."""
    ours: list[Target] = [Afd(x, gpus - x, wire) for x in _balanced_first(gpus)]
    theirs: list[Target] = [Colocated(gpus), Colocated(1, gpus)]
    if gpus % 2 == 0 and gpus > 2:
        theirs.append(Colocated(2, gpus // 2))
    return ours + theirs


def in_modes(
    targets: Sequence[Target],
    lookahead: Sequence[bool],
    mode: Literal["compiled", "graphs"],
    kernels: Sequence[str] = ("vllm",),
) -> list[Target]:
    """Returns each deployment with every value of ``lookahead`` and ``kernels``, then vLLM's
    targets in ``mode``."""
    ours = [
        replace(t, lookahead=on, kernel=kernel)
        for t, on, kernel in product(targets, lookahead, kernels)
        if isinstance(t, Afd)
    ]
    return ours + [replace(t, mode=mode) for t in targets if isinstance(t, Colocated)]


def _balanced_first(gpus: int) -> list[int]:
    return sorted(range(1, gpus), key=lambda x: (abs(2 * x - gpus), -x))


@dataclass(frozen=True)
class Sizes:
    """Limits of every server of a run.

    requests: over all schedulers. length: tokens of a request, prompt plus answer. kv_gib: KV cache
    per GPU, averaged over all GPUs of a target with or without a cache, so that every server holds
    the same number of tokens. batches: numbers of concurrent requests, over all schedulers, for
    which decode graphs are captured; () uses vLLM's default. step_tokens: most tokens of a step.
    """

    requests: int
    length: int
    kv_gib: float
    batches: tuple[int, ...] = ()
    step_tokens: int = 2048


class ServerSettings(TypedDict):
    """Arguments of :func:`afd_bench.servers.colocated` that are also keys of a deployment file's
    section attention."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_cache_gib: float


def settings_of(target: Target, sizes: Sizes) -> ServerSettings:
    """Returns the limits of one scheduler of the target."""
    requests = share(target, sizes.requests)
    return {
        "max_model_len": sizes.length,
        "max_num_seqs": requests,
        "max_num_batched_tokens": max(sizes.step_tokens, requests),
        "kv_cache_gib": sizes.kv_gib * target.gpus / (target.replicas * target.kv_gpus),
    }


def share(target: Target, requests: int) -> int:
    """Returns the requests that one scheduler must accept. The total exceeds ``requests``, because
    vLLM's balancer distributes them unevenly."""
    if target.replicas == 1:
        return requests
    each = -(-requests // target.replicas)
    return -(-(each + max(4, each // 8)) // 8) * 8


def graph_args(target: Colocated, sizes: Sizes) -> list[str]:
    """Returns vLLM's arguments for the graph sizes of ``sizes.batches``.

    vLLM's defaults end at 512; a run needs only a few sizes, some of them larger. Our
    deployments choose their sizes themselves (afd/graph_sizes.py).
    """
    even = {-(-batch // target.replicas) for batch in sizes.batches}
    found = sorted(even | {share(target, batch) for batch in sizes.batches})
    return ["--cudagraph-capture-sizes", *map(str, found)] if found else []


def vllm_args(device: str, filled: bool, kv: str = "bfloat16") -> list[str]:
    """Returns the arguments of every vLLM, in deployments and as a peer.

    filled: fills prompts instead of computing them (:data:`FILLED`), and skips detokenisation, the
    most expensive work of an API server. kv: dtype of the cache, bfloat16 or fp8.
    """
    args = [] if kv == "bfloat16" else [f"--kv-cache-dtype={kv}"]
    if filled:
        connector = FILLED if kv == "bfloat16" else FILLED_FP8
        args += [f"--kv-transfer-config={json.dumps(connector)}", "--skip-tokenizer-init"]
    if device != "cpu":
        # Several servers share a GPU; by default vLLM refuses to start unless most of it is free.
        args.append("--gpu-memory-utilization=0.05")
    return args


def deployment(
    target: Afd, model: Path, sizes: Sizes, device: str, args: Sequence[str], depth: int = 3
) -> dict[str, object]:
    """Returns the contents of the deployment file. args: arguments of vLLM."""
    verbs = {"verbs": {"ports": list(PORTS), "library": target.nic}} if target.nic else {}
    return {
        "model": str(model.absolute()),
        "gpus": target.shared,
        "attention": {
            **settings_of(target, sizes),
            "instances": target.attention,
            "device": device,
            "dtype": "bfloat16",
            "kernel": target.kernel,
            "fused": target.fused,
            "vllm_args": list(args),
        },
        # Long deadlines (late_ms, timeout_s, stuck_s): the start of a profiler or the compilation
        # of a kernel must not drop or end an instance.
        "ffn": {
            "instances": target.ffn,
            "tp": target.tp,
            "device": device,
            "load": "dummy" if target.dummy else "checkpoint",
            "backend": target.backend,
            "weights": target.weights,
            "late_ms": 20_000.0,
        },
        "pipeline": {
            "depth": depth,
            "min_rows": 1,
            "graphs": target.graphs,
            "lookahead": target.lookahead,
        },
        "wire": {"format": target.wire},
        "transport": {"backend": target.over, **verbs},
        "control": {"timeout_s": 15.0},
        "deadlines": {"start_s": START_S, "stuck_s": 60.0},
        "metrics": {"stage_every": target.stage_every},
    }


NO_FUSED_ALLREDUCE = {"fuse_allreduce_rms": False}
"""Turns off vLLM's fusion of all-reduce and norm, a default on Hopper. FlashInfer would compile its
kernels for minutes at the start, and they need NVLink multicast, which is off on shared hosts."""


def compilation(target: Colocated) -> dict[str, object]:
    """Returns vLLM's compilation config. It captures only decode steps, as only these are timed."""
    config: dict[str, object] = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    if target.mode == "graphs":
        return {"mode": 0, **config}
    return {**config, "pass_config": NO_FUSED_ALLREDUCE} if target.tp > 1 else config
