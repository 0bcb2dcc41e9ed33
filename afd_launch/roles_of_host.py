"""The commands that `afd serve` runs on this host, with their ports, cores and role files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afd.config.deployment import Deployment
from afd.config.roles import RoleSpec
from afd.control.address import to_connect
from afd.control.keys import CurveKeys
from afd.host.ports import check_free, held_ports
from afd_launch.cpus import plan_for
from afd_launch.process import Command
from afd_launch.supervisor import Stage

# seconds from SIGTERM to SIGKILL; the gateway gets deadlines.drain_s in addition
STOP_S = {"control": 5.0, "ffn": 5.0, "attention": 15.0, "gateway": 5.0}


@dataclass(frozen=True)
class Ports:
    """Every address that the deployment listens on, chosen before anything starts."""

    gateway: int
    attention: tuple[int, ...]
    control_address: str


@contextlib.contextmanager
def held_addresses(deployment: Deployment) -> Iterator[Ports]:
    """The ports of the file; free ports, which stay reserved meanwhile, for those that it omits.

    Raises ConfigError if a port of the file is in use.
    """
    gateway, attention, control = deployment.gateway, deployment.attention, deployment.control
    hosts = [gateway.host, "127.0.0.1", *[attention.host] * attention.instances]
    with held_ports(hosts) as free:
        port = gateway.port or free[0]
        check_free(gateway.host, port, "gateway.port (or --port)")
        api_ports = [p or free[2 + i] for i, p in enumerate(attention.api_ports())]
        for index, api_port in enumerate(api_ports):
            setting = "attention.port" + (f" (instance {index})" if index else "")
            check_free(attention.host, api_port, setting)
        if control.address == "auto":
            address = f"tcp://127.0.0.1:{free[1]}"
        else:
            address = control.address
            endpoint = to_connect(address)
            check_free(endpoint.host, endpoint.port, "control.address")
        yield Ports(port, tuple(api_ports), address)


def role_specs(deployment: Deployment, ports: Ports, cores: Sequence[int]) -> list[RoleSpec]:
    """Returns one spec per process, in start order, without keys. Pure."""
    cpus = plan_for(deployment, cores)
    tp = deployment.ffn.tp
    base = RoleSpec("control", 0, deployment, ports.control_address)
    return [
        base,
        *(
            replace(base, role="ffn", index=number // tp, rank=number % tp, cpus=own)
            for number, own in enumerate(cpus.ffn)
        ),
        *(
            replace(base, role="attention", index=i, cpus=own, api_port=ports.attention[i])
            for i, own in enumerate(cpus.attention)
        ),
        replace(base, role="gateway", api_port=ports.gateway),
    ]


OPERATOR_KEYS = "operator.keys"
"""File in the private folder with the keys of operators."""


def with_keys(specs: Sequence[RoleSpec], folder: Path) -> list[RoleSpec]:
    """Writes key files into the private ``folder``; returns the specs that name them.

    The keys come from ``control.keys``; without it they are new. The control plane gets the
    deployment's file, every other role a file with its own keys. Raises ConfigError.
    """
    given = specs[0].deployment.control.keys
    keys = CurveKeys.load(given) if given else CurveKeys.generate()
    keys.operator.save(folder / OPERATOR_KEYS)
    found = []
    for spec in specs:
        file = folder / f"{spec.id}.keys"
        (keys if spec.role == "control" else keys.member(spec.id)).save(file)
        found.append(replace(spec, keys_file=file))
    return found


def stages(specs: Sequence[RoleSpec], run_dir: Path) -> list[Stage]:
    """Writes the role files into ``run_dir`` and returns the commands by role, in start order."""
    found = []
    for role, stop_s in STOP_S.items():
        commands = tuple(_command(spec, run_dir) for spec in specs if spec.role == role)
        if role == "gateway":
            stop_s += specs[0].deployment.deadlines.drain_s
        # Attention instances start without waiting for FFN instances: importing vLLM takes long,
        # and they wait for the FFN instances themselves before they serve.
        found.append(Stage(commands, stop_s, awaited=role != "ffn"))
    return found


def _command(spec: RoleSpec, run_dir: Path) -> Command:
    file = run_dir / f"{spec.id}.json"
    spec.save(file)
    env = {
        "OMP_NUM_THREADS": str(spec.threads if spec.cpus else 1),
        "PYTHONUNBUFFERED": "1",
        # sockets and temporary files are removed with the run directory
        "TMPDIR": str(run_dir),
    }
    argv = (sys.executable, "-m", "afd_launch.cli", spec.role, "--role-file", str(file))
    return Command(
        spec.id,
        argv,
        env,
        ends_all=spec.role == "control",
        stateless=spec.role == "ffn",
        holds_requests=spec.role == "attention",
    )


def available_cores() -> list[int]:
    """Returns the cores this process may run on (as limited by taskset or a cgroup)."""
    return sorted(os.sched_getaffinity(0))
