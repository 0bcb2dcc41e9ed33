"""`afd serve`: runs every role of one deployment on this host."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from afd.config.deployment import Deployment
from afd.control.keys import load_client
from afd.control.local_keys import announced
from afd.errors import ConfigError
from afd_gateway.files import check_files
from afd_gateway.inherited import held_port
from afd_launch.gpus import of_this_host
from afd_launch.host_checks import HostFacts, look, prepared, rails_of
from afd_launch.host_view import control_address, seen_from
from afd_launch.host_watch import HostWatch
from afd_launch.installation import require_vllm
from afd_launch.other_hosts import OtherHosts, roles_of
from afd_launch.output import unblocked_output
from afd_launch.private_folder import private_folder
from afd_launch.readiness import Readiness
from afd_launch.role_log import say
from afd_launch.roles_of_host import (
    OPERATOR_KEYS,
    STOP_S,
    Ports,
    available_cores,
    held_addresses,
    role_specs,
    stages,
    with_keys,
)
from afd_launch.stall_monitor import RETURN_S, StallMonitor
from afd_launch.supervisor import Supervisor
from afd_launch.this_host import this_host


def serve(
    deployment: Deployment,
    *,
    host: str | None = None,
    log_dir: Path | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Starts all roles of this host and runs until a signal.

    Args:
        host: name of this host in the file; None: the one whose address this machine has.
        on_ready: called with the gateway's URL, on its host.

    Returns:
        the exit status (see ``Supervisor.run``).

    Raises:
        ConfigError: before the first start, if a port is in use, the log directory cannot be
            created, or this machine is not the host.
    """
    require_vllm()
    name = this_host(deployment, host)
    place = deployment.place_of(name)
    if place.ffn or deployment.ffn.arch == "auto":
        deployment = of_this_host(deployment)
    with ExitStack() as stack:
        ports = stack.enter_context(held_addresses(seen_from(deployment, name), name))
        if ports.gateway:
            check_files(deployment.gateway)
        if log_dir:
            make_log_dir(log_dir)
        stack.enter_context(unblocked_output())
        return _serve(deployment, name, ports, log_dir, on_ready)


def _serve(
    deployment: Deployment,
    name: str,
    ports: Ports,
    log_dir: Path | None,
    on_ready: Callable[[str], None],
) -> int:
    began = time.monotonic()
    scheme = "http" if deployment.gateway.tls is None else "https"
    url = f"{scheme}://{reachable(deployment.gateway.host)}:{ports.gateway}"

    def ready() -> None:
        after = f"ready after {time.monotonic() - began:.0f} s"
        if not ports.gateway:
            say(f"{after}: {what}")
            return
        say(f"{after}: {url}/v1 ({what})")
        on_ready(url)

    with ExitStack() as stack:
        run_dir, watchdog = stack.enter_context(private_folder())
        specs = role_specs(seen_from(deployment, name), ports, available_cores(), name)
        what = summary(deployment) + (
            f"; host {name}: {roles_of(deployment)[name]}" if name else ""
        )
        specs = with_keys(specs, run_dir)
        operator = run_dir / OPERATOR_KEYS
        keys = load_client(operator)
        stamp = f", keys {keys.fingerprint}" if name else ""
        say(f"starting {what}; control plane at {ports.control_address}{stamp}")
        found = stack.enter_context(announced(ports.control_address, operator))
        given = control_address(deployment)
        if given not in ("auto", ports.control_address):
            stack.enter_context(announced(given, operator))  # by its name
        named = "" if found else f" --keys {operator}"
        say(f"operate it with: afd ctl --control {ports.control_address}{named} status")
        hosts = None
        if len(deployment.hosts) > 1:
            others = OtherHosts(deployment, name, ports.control_address, keys)
            stack.callback(others.close)
            hosts = HostWatch(others, say)
        facts = look() if name or deployment.transport.verbs.ports else HostFacts()
        try:
            specs = prepared(specs, facts)
        except ConfigError as error:
            if hosts is not None:
                hosts.failed(str(error))
            raise
        if hosts is not None:
            others.rails(rails_of(specs, facts))
        readiness = stack.enter_context(Readiness(specs, operator))
        port = None
        if ports.gateway:
            gateway = deployment.gateway
            port = stack.enter_context(held_port(gateway.host, ports.gateway, gateway.processes))
        supervisor = Supervisor(
            stages(specs, run_dir, port.inherited if port else None),
            readiness.awaited,
            start_s=deployment.deadlines.start_s,
            restart=deployment.restart,
            watchdog=watchdog,
            log_dir=log_dir,
            on_ready=ready,
            on_stop=port.refuse if port else lambda: None,
            stall_monitor=StallMonitor(readiness.is_member),
            leave_monitor=StallMonitor(
                readiness.is_serving, max(RETURN_S, deployment.deadlines.drain_s)
            ),
            leave_s=deployment.deadlines.drain_s + STOP_S["attention"],
            orders=readiness,
            hosts=hosts,
        )
        return supervisor.run()


def check_machine(deployment: Deployment, host: str) -> None:
    """Checks that this machine can be ``host``. Raises ConfigError."""
    name = this_host(deployment, host)
    ports = Ports(0, (0,) * deployment.attention.capacity, "")
    prepared(role_specs(seen_from(deployment, name), ports, available_cores(), name), look())


def summary(deployment: Deployment) -> str:
    """Returns ``model demo, 1 prefill + 1 attention + 1 FFN of 2 ranks, depth 3, exact wire``."""
    prefill, attention, ffn = deployment.prefill, deployment.attention, deployment.ffn
    ranks = [f" of {pool.tp} ranks" if pool.tp > 1 else "" for pool in (attention, ffn)]
    prefills = f"{prefill.instances} prefill + " if prefill.instances else ""
    decoding = attention.instances - (prefill.instances if prefill.by == "afd" else 0)
    return (
        f"model {deployment.served_model_name}, {prefills}{decoding} attention{ranks[0]} +"
        f" {ffn.instances} FFN{ranks[1]}, depth {deployment.depth},"
        f" {deployment.wire.format} wire"
    )


def weights_note(deployment: Deployment) -> str:
    """Returns a note if the model folder has no weights, as with the shipped presets; else ""."""
    if any(deployment.model.glob("*.safetensors")):
        return ""
    return f"; {deployment.model} holds no weights: serve a checkpoint with --set model=/path/to/it"


def make_log_dir(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"cannot create the log directory {path}: {err.strerror}") from None


def reachable(host: str) -> str:
    """Returns the address at which a client on this host reaches a server bound to ``host``."""
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host
