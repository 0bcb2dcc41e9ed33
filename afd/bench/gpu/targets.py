"""What `afd bench gpu` starts: xAyF deployments, and colocated vLLM on as many GPUs.

All of a run's servers are up at the same time and are measured in turns, so that a drift of the
clocks meets each of them; one without requests does not touch its GPU.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Literal

from afd.bench.servers import Server, colocated, disaggregated
from afd.errors import AfdError, ConfigError

START_S = 240.0
PEER = "vllm colocated"
FILLED = {
    "kv_connector": "DecodeBenchConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"fill_mean": 0.0, "fill_std": 0.1},
}
"""vLLM's connector that fills the cache of a prompt with random numbers instead of computing it."""
FILLED_FP8 = {**FILLED, "kv_connector_extra_config": {"fill_mean": 0x38}}
"""The same for an FP8 cache, which it takes for bytes, of which it has no random ones: all 1.0."""


@dataclass(frozen=True)
class Afd:
    """x attention and y FFN instances, one GPU each or ``tp`` GPUs per FFN instance, or ``shared``
    GPUs for all of them. stage_every: see metrics.stage_every; lookahead: see pipeline.lookahead;
    kernel: see attention.kernel; dummy: ffn.load is dummy."""

    attention: int
    ffn: int
    wire: str = "exact"
    graphs: bool = True
    stage_every: int = 0
    lookahead: bool = False
    shared: int | None = None
    tp: int = 1
    kernel: str = "vllm"
    dummy: bool = False

    @property
    def gpus(self) -> int:
        return self.attention + self.ffn * self.tp

    @property
    def replicas(self) -> int:
        """Schedulers that the requests are spread over."""
        return self.attention

    @property
    def kv_gpus(self) -> int:
        """GPUs that share the KV cache of one scheduler."""
        return 1

    @property
    def name(self) -> str:
        return f"{self.attention}A{self.ffn}F" + (f"-tp{self.tp}" if self.tp > 1 else "")

    @property
    def label(self) -> str:
        """As the case of a record: ``2A2F fp8``, ``1A1F exact eager``."""
        ahead = " lookahead" if self.lookahead else ""
        eager = "" if self.graphs else " eager"
        shared = f" on {self.shared} GPUs" if self.shared else ""
        kernel = f" {self.kernel}" if self.kernel != "vllm" else ""
        dummy = " dummy experts" if self.dummy else ""
        return f"{self.name} {self.wire}{kernel}{ahead}{eager}{shared}{dummy}"


def fitted(target: Afd, gpus: int) -> Afd:
    """The same on ``gpus`` GPUs, which its instances share where they are fewer than it has."""
    return replace(target, shared=gpus) if 0 < gpus < target.gpus else target


@dataclass(frozen=True)
class Colocated:
    """Plain vLLM: dp replicas of tp GPUs each. With more than one replica the experts are divided
    over all GPUs (expert parallelism). mode: ``compiled`` is vLLM's default of torch.compile and
    graphs, whose start takes longest; ``graphs`` has graphs of decode steps only."""

    tp: int
    dp: int = 1
    mode: Literal["compiled", "graphs", "eager"] = "compiled"

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
    """``2A2F``, ``1A1F-tp2`` (two GPUs per FFN instance), ``TP4``, ``DP4+EP`` or ``TP2xDP2``.
    Raises ConfigError for anything else."""
    if found := re.fullmatch(r"([1-9])A([1-9])F(?:-tp([1-8]))?", text):
        return Afd(int(found[1]), int(found[2]), wire, tp=int(found[3] or 1))
    if found := re.fullmatch(r"TP([1-8])(?:xDP([1-8]))?", text):
        return Colocated(int(found[1]), int(found[2] or 1))
    if found := re.fullmatch(r"DP([1-8])\+EP", text):
        return Colocated(1, int(found[1]))
    raise ConfigError(f"{text!r} is no target; write 2A2F, 1A1F-tp2, TP4, DP4+EP or TP2xDP2")


def best_for(gpus: int, wire: str = "exact") -> list[Target]:
    """Every topology of this many GPUs (at least two), ours before vLLM's."""
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
    """Each of ours with every one of ``lookahead`` and ``kernels``, then vLLM's in ``mode``."""
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
    """Limits that every server of a run is given. requests: over all schedulers. length: tokens of
    a request, prompt and answer. kv_gib: KV cache per GPU, those without one counted too: every
    server has room for the same number of tokens. batches: requests at a time, over all schedulers,
    whose decode steps are to be graphs; () leaves the sizes to vLLM. step_tokens: of a step."""

    requests: int
    length: int
    kv_gib: float
    batches: tuple[int, ...] = ()
    step_tokens: int = 2048


def settings_of(target: Target, sizes: Sizes) -> dict[str, int | float]:
    """Keyword arguments of :func:`afd.bench.servers.colocated`, keys of a section attention."""
    requests = share(target, sizes.requests)
    return {
        "max_model_len": sizes.length,
        "max_num_seqs": requests,
        "max_num_batched_tokens": max(sizes.step_tokens, requests),
        "kv_cache_gib": sizes.kv_gib * target.gpus / (target.replicas * target.kv_gpus),
    }


def share(target: Target, requests: int) -> int:
    """Requests that one scheduler must have room for: vLLM's balancer does not deal them evenly."""
    if target.replicas == 1:
        return requests
    each = -(-requests // target.replicas)
    return -(-(each + max(4, each // 8)) // 8) * 8


def graph_args(target: Target, sizes: Sizes) -> list[str]:
    """vLLM captures sizes up to 512 in steps of 16 at most, where a run needs a few, also above."""
    even = {-(-batch // target.replicas) for batch in sizes.batches}
    found = sorted(even | {share(target, batch) for batch in sizes.batches})
    return ["--cudagraph-capture-sizes", *map(str, found)] if found else []


def vllm_args(device: str, filled: bool, kv: str = "bfloat16") -> list[str]:
    """For every vLLM, ours and theirs. filled: prompts are not computed (:data:`FILLED`), and
    answers are not made into text, which takes longer than all else that an API server does. kv:
    bfloat16 or fp8, of the cache."""
    args = [] if kv == "bfloat16" else [f"--kv-cache-dtype={kv}"]
    if filled:
        connector = FILLED if kv == "bfloat16" else FILLED_FP8
        args += [f"--kv-transfer-config={json.dumps(connector)}", "--skip-tokenizer-init"]
    if device != "cpu":
        # Several servers share a GPU, and vLLM would refuse to start on one that is not all free.
        args.append("--gpu-memory-utilization=0.05")
    return args


def deployment(
    target: Afd, model: Path, sizes: Sizes, device: str, args: Sequence[str], depth: int = 3
) -> dict[str, object]:
    """Contents of the deployment file. args: of vLLM."""
    return {
        "model": str(model.absolute()),
        "gpus": target.shared,
        "attention": {
            **settings_of(target, sizes),
            "instances": target.attention,
            "device": device,
            "dtype": "bfloat16",
            "kernel": target.kernel,
            "vllm_args": list(args),
        },
        # A profiler that starts, or a kernel that is compiled, is no reason to drop an instance or
        # to end one: late_ms, timeout_s, stuck_s.
        "ffn": {
            "instances": target.ffn,
            "tp": target.tp,
            "device": device,
            "load": "dummy" if target.dummy else "checkpoint",
            "late_ms": 20_000.0,
        },
        "pipeline": {
            "depth": depth,
            "min_rows": 1,
            "graphs": target.graphs,
            "lookahead": target.lookahead,
        },
        "wire": {"format": target.wire},
        "control": {"timeout_s": 15.0},
        "deadlines": {"start_s": START_S, "stuck_s": 60.0},
        "metrics": {"stage_every": target.stage_every},
    }


NO_FUSED_ALLREDUCE = {"fuse_allreduce_rms": False}
"""vLLM's fusion of all-reduce and norm, a default on Hopper, has FlashInfer build its kernels at
the start (minutes), and they use NVLink multicast, which is off on shared hosts."""


def compilation(target: Colocated) -> dict[str, object]:
    """vLLM's compilation config. Only graphs of decode steps are captured: no others are timed."""
    config: dict[str, object] = {"cudagraph_mode": "FULL_DECODE_ONLY"}
    if target.mode == "graphs":
        return {"mode": 0, **config}
    return {**config, "pass_config": NO_FUSED_ALLREDUCE} if target.tp > 1 else config


@contextlib.contextmanager
def serve(
    target: Target, model: Path, sizes: Sizes, device: str, args: Sequence[str], logs: Path
) -> Iterator[Server]:
    """A running server of this target on the first GPUs, its log in ``logs``. Raises AfdError."""
    logs.mkdir(parents=True, exist_ok=True)
    marked = "-marked" if isinstance(target, Afd) and target.stage_every else ""
    log = logs.absolute() / f"{target.label.replace(' ', '-')}{marked}.log"
    with contextlib.ExitStack() as stack:
        flags = [*args, *([] if device == "cpu" else graph_args(target, sizes))]
        if isinstance(target, Afd):
            config = deployment(target, model, sizes, device, flags)
            yield stack.enter_context(disaggregated(config, deadline_s=START_S, log=log))
            return
        parallel = []
        if device == "cpu" and target.gpus > 1:
            raise ConfigError(f"{target.name} needs {target.gpus} GPUs; on CPU only TP1 is run")
        if target.gpus > 1:
            parallel = [f"--tensor-parallel-size={target.tp}"]
        if target.dp > 1:
            parallel += [f"--data-parallel-size={target.dp}", "--enable-expert-parallel"]
        if target.mode != "eager" and device != "cpu":
            parallel.append(f"--compilation-config={json.dumps(compilation(target))}")
        yield stack.enter_context(
            colocated(
                model.absolute(),
                dtype="bfloat16",
                vllm_args=[*parallel, *flags],
                compiled=target.mode != "eager" and device != "cpu",
                gpus=() if device == "cpu" else range(target.gpus),
                ranks=target.dp if target.dp > 1 else 0,
                deadline_s=START_S,
                log=log,
                **settings_of(target, sizes),
            )
        )


@contextlib.contextmanager
def running(
    targets: Sequence[Target],
    model: Path,
    sizes: Sizes,
    device: str,
    args: Sequence[str],
    logs: Path,
) -> Iterator[Mapping[Target, Server]]:
    """All targets that start; the others are named with the reason. They start and end together.
    One that is named twice is started once.

    Raises:
        AfdError: none started.
    """
    targets = list(dict.fromkeys(targets))

    def start(target: Target) -> tuple[contextlib.ExitStack, Server] | str:
        stack = contextlib.ExitStack()
        for last in (False, True):
            try:
                return stack, stack.enter_context(serve(target, model, sizes, device, args, logs))
            except AfdError as err:
                # Ports are chosen before they are bound, and the servers start at the same time.
                if last or "in use" not in str(err):
                    return str(err)
        raise AssertionError

    with ThreadPoolExecutor(len(targets)) as pool:
        started = dict(zip(targets, pool.map(start, targets), strict=True))
        up = {target: found for target, found in started.items() if not isinstance(found, str)}
        try:
            for target, found in started.items():
                if isinstance(found, str):
                    print(f"{target.label}: FAILED: {found}", flush=True)
            if not up:
                raise AfdError("no server started; the reasons are above")
            yield {target: server for target, (_, server) in up.items()}
        finally:
            list(pool.map(lambda found: found[0].close(), up.values()))
