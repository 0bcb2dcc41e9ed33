"""Checks that the host does not synchronize with the GPU per layer while steps are replayed.

The attention instance runs under vLLM's profiler and the FFN instance under PyTorch's, both for a
fraction of a second of steady decode. A step is one graph launch; the number of other CUDA calls
per step must not grow with the layers. The check fails if a step has as many waits, or as many
copies to the host, as layers. (A guard that polls whether a stream is finished is not a wait.)
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from afd.config.deployment import Deployment
from afd.control.local_keys import announced
from afd.errors import AfdError, DeadlineExceeded
from afd_bench.gpu.common import (
    Report,
    add_model,
    case_of,
    count,
    model_of,
    parser,
    report,
    usable_gpus,
)
from afd_bench.gpu.kv import default_gib
from afd_bench.gpu.load import Load, held
from afd_bench.gpu.slices import Slice
from afd_bench.gpu.targets import (
    START_S,
    Afd,
    Sizes,
    deployment,
    fitted,
    vllm_args,
)
from afd_bench.servers import Server, await_health, server_process
from afd_bench.stages import totals
from afd_launch.roles_of_host import (
    OPERATOR_KEYS,
    available_cores,
    held_addresses,
    role_specs,
    with_keys,
)

WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
)
"""Calls in which a host waits for a GPU. cudaMemcpyAsync to pageable memory counts as a copy."""
START, STARTED, STOP = ".start", ".started", ".stop"
"""Suffixes of the files by which the FFN instance's profiler is told; see profile_ffn_torch.py."""
LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch")


@dataclass(frozen=True)
class Calls:
    """CUDA calls of a trace.

    launches: graph launches. waits: waiting calls by name. to_host: copies from device to host.
    """

    launches: int
    waits: Mapping[str, int]
    to_host: int

    def per_step(self) -> tuple[float, float]:
        """Returns (waits, copies to the host) per graph launch. Raises AfdError if none was."""
        if not self.launches:
            raise AfdError("no graph was launched while the profiler ran; see the server's log")
        return sum(self.waits.values()) / self.launches, self.to_host / self.launches


_STOP_S = 300.0
"""Deadline for vLLM's profiler calls; vLLM summarises its profile before it responds."""
_WRITE_S = 60.0
"""Deadline for writing a trace, a file of many megabytes."""
_TRACE = "trace.json"


def calls(trace: Mapping[str, Any]) -> Calls:
    """Counts the CUDA calls of a trace of PyTorch's profiler, in Chrome's format. Pure."""
    waits: Counter[str] = Counter()
    launches = to_host = 0
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, kind = event["name"], event.get("cat", "")
        if kind in ("cuda_runtime", "cuda_driver"):
            launches += name in LAUNCHES
            if name in WAITS:
                waits[name] += 1
        elif kind == "gpu_memcpy" and "DtoH" in name:
            to_host += 1
    return Calls(launches, dict(waits), to_host)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a host waited or copied once per layer or more, else 0."""
    options = parser("profile", __doc__, 240.0)
    add_model(options, "qwen3-30b")
    options.add_argument("--batch", type=count, default=64, help="requests at a time")
    options.add_argument(
        "--depth", type=int, default=3, choices=(1, 2, 3), help="micro-batches in flight"
    )
    options.add_argument("--context", type=count, default=256, help="tokens of a prompt")
    options.add_argument(
        "--profiled-s", type=float, default=0.3, help="seconds to run under the profilers"
    )
    args = options.parse_args(argv)
    length = args.context + 4_000
    model_slice, path = model_of(args, args.model, length)
    sizes = Sizes(args.batch, length, default_gib(args.device), (args.batch,))
    out = report("gpu", args, "profile", argv)
    with (
        tempfile.TemporaryDirectory(prefix="afd-profile-") as folder,
        roles(Path(folder), path, sizes, args) as server,
    ):
        load = Load(args.batch, args.context, sizes.length, model_slice.sizes.vocab, args.seed)
        asyncio.run(_profile(server, Path(folder, "ffn", _TRACE), load, args))
        found = {
            "attention": calls(_trace_of(Path(folder, "attention"), _WRITE_S)),
            "ffn": calls(_trace_of(Path(folder, "ffn"), _WRITE_S)),
        }
    return _judge(found, model_slice, args, out)


def _judge(
    found: Mapping[str, Calls], model_slice: Slice, args: argparse.Namespace, out: Report
) -> int:
    status, layers = 0, model_slice.sizes.layers
    for side, counted in found.items():
        if args.device == "cpu":
            print(f"{side}: {counted.launches} graph launches; 0 are expected without a GPU")
            continue
        waits, copies = counted.per_step()
        good = waits < layers and copies < layers
        status |= not good
        print(
            f"{side}: {waits:.2f} waits and {copies:.2f} copies to the host per step of {layers}"
            f" layers x {args.depth}, over {counted.launches} steps: {'ok' if good else 'FAILED'}"
            f" ({dict(counted.waits)})",
            flush=True,
        )
        case = f"{case_of(args.model, model_slice)} {side} depth {args.depth} batch {args.batch}"
        for metric, value in (("host_waits_per_step", waits), ("copies_to_host_per_step", copies)):
            out.add(case, metric, value, "calls", "layers", layers, more_is_better=False)
    return int(status)


@contextlib.contextmanager
def roles(folder: Path, model: Path, sizes: Sizes, args: argparse.Namespace) -> Iterator[Server]:
    """Runs 1A1F without a gateway, with each role as a child process, for its profiler.

    Yields the server of the attention instance.
    """
    profiler = {
        "profiler": "torch",
        "torch_profiler_dir": str(folder / "attention"),
        "torch_profiler_with_stack": False,
        "torch_profiler_use_gzip": False,
        "ignore_frontend": True,
    }
    gpus = 0 if args.device == "cpu" else usable_gpus()
    target = fitted(Afd(1, 1), gpus)  # may share a GPU: calls are counted, not timed
    flags = [
        *vllm_args(args.device, True),
        f"--profiler-config={json.dumps(profiler)}",
        *args.vllm_args,
    ]
    plain = deployment(target, model, sizes, args.device, flags)
    attention = plain["attention"]
    assert isinstance(attention, dict)
    attention["port"] = 0
    served = Deployment.from_plain({**plain, "served_model_name": "model", "gateway": {"port": 0}})
    ffn_trace = folder / "ffn"
    ffn_trace.mkdir()
    wrapped = ["-m", "afd_bench.gpu.profile_ffn_torch", str(ffn_trace / _TRACE)]
    args.logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        ports = stack.enter_context(held_addresses(served))
        started = {}
        specs = with_keys(role_specs(served, ports, available_cores()), folder)
        stack.enter_context(announced(ports.control_address, folder / OPERATOR_KEYS))
        for spec in specs:
            if spec.role == "gateway":
                continue
            file = folder / f"{spec.id}.json"
            spec.save(file)
            how = wrapped if spec.role == "ffn" else ["-m", "afd_launch.cli", spec.role]
            argv = [sys.executable, *how, "--role-file", str(file)]
            log = args.logs / f"profile-{spec.id}.log"
            started[spec.role] = stack.enter_context(server_process(argv, os.environ, log))
        url, log = f"http://127.0.0.1:{ports.attention[0]}", args.logs / "profile-attention-0.log"
        await_health(started["attention"], url, log, START_S)
        leader = started["attention"]
        yield Server(url, "model", log, ports.control_address, leader.pid)


async def _profile(
    server: Server,
    ffn_trace: Path,
    load: Load,
    args: argparse.Namespace,
) -> None:
    server.set_depth(args.depth)
    async with held(server, load):
        ffn_trace.with_suffix(START).touch()
        await asyncio.to_thread(_started, ffn_trace, server)
        await asyncio.to_thread(_post, f"{server.url}/start_profile")
        await asyncio.sleep(args.profiled_s)
        await asyncio.to_thread(_post, f"{server.url}/stop_profile")
        ffn_trace.with_suffix(STOP).touch()


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=_STOP_S):
        pass


def _started(trace: Path, server: Server) -> None:
    """Waits until the FFN instance's profiler runs. Raises DeadlineExceeded."""
    end, generated = time.monotonic() + _WRITE_S, totals(server.metrics(), 0).generated
    while not trace.with_suffix(STARTED).exists():
        if time.monotonic() > end:
            generated = totals(server.metrics(), 0).generated - generated
            raise DeadlineExceeded(
                f"the profiler of the FFN instance did not start within {_WRITE_S:g} s, in which"
                f" {generated} tokens were generated; see its log"
            )
        time.sleep(0.02)


def _trace_of(folder: Path, deadline_s: float) -> dict[str, Any]:
    """Returns the only trace in a folder once it is complete. Raises DeadlineExceeded."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        for file in folder.glob("*.json"):
            with contextlib.suppress(ValueError):  # still being written
                trace: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
                return trace
        time.sleep(0.2)
    raise DeadlineExceeded(
        f"no complete trace in {folder} within {deadline_s:g} s; see the server's log"
    )
