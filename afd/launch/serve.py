"""`afd serve`: every role of one deployment on this host."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from afd.config import Deployment
from afd.errors import ConfigError
from afd.launch.logs import say
from afd.launch.plan import Ports, available_cores, held_addresses, role_specs, stages
from afd.launch.readiness import Readiness
from afd.launch.standstill import Standstill
from afd.launch.supervisor import Supervisor


def serve(
    deployment: Deployment,
    *,
    log_dir: Path | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Start all roles and run until a signal; ``on_ready`` is given the gateway's URL.

    Returns the exit status (see ``Supervisor.run``). Raises ConfigError before anything is started
    if a port is in use or the log directory cannot be made.
    """
    with held_addresses(deployment) as ports:
        if log_dir:
            _make_log_dir(log_dir)
        return _serve(deployment, ports, log_dir, on_ready)


def _serve(
    deployment: Deployment, ports: Ports, log_dir: Path | None, on_ready: Callable[[str], None]
) -> int:
    began = time.monotonic()
    specs = role_specs(deployment, ports, available_cores())
    url = f"http://{_reachable(deployment.gateway.host)}:{ports.gateway}"

    def ready() -> None:
        say(f"ready after {time.monotonic() - began:.0f} s: {url}/v1 ({summary(deployment)})")
        on_ready(url)

    say(f"starting {summary(deployment)}; control plane at {ports.control_address}")
    with run_directory() as run_dir, Readiness(specs) as readiness:
        supervisor = Supervisor(
            stages(specs, run_dir),
            readiness.awaited,
            start_s=deployment.deadlines.start_s,
            restart=deployment.restart,
            run_dir=run_dir,
            log_dir=log_dir,
            on_ready=ready,
            standstill=Standstill(readiness.is_member),
        )
        return supervisor.run()


def summary(deployment: Deployment) -> str:
    """``model demo, 1 attention + 1 FFN of 2 ranks, depth 3, exact wire``."""
    ranks = f" of {deployment.ffn.tp} ranks" if deployment.ffn.tp > 1 else ""
    return (
        f"model {deployment.served_model_name}, {deployment.attention.instances} attention +"
        f" {deployment.ffn.instances} FFN{ranks}, depth {deployment.pipeline.depth},"
        f" {deployment.wire.format} wire"
    )


def weights_note(deployment: Deployment) -> str:
    """What is still missing where the model's folder has a config.json only, as with presets."""
    if any(deployment.model.glob("*.safetensors")):
        return ""
    return f"; {deployment.model} holds no weights: serve a checkpoint with --set model=/path/to/it"


@contextmanager
def run_directory() -> Iterator[Path]:
    """A private (0700) directory for role files and sockets, removed afterwards."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base and os.access(base, os.W_OK)
    path = Path(tempfile.mkdtemp(prefix="afd-", dir=base if usable else None))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"cannot make the log directory {path}: {err.strerror}") from None


def _reachable(host: str) -> str:
    """An address that a client on this host can use for a server bound to ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
