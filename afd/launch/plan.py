"""From a deployment to the commands that `afd serve` runs: ports, cores, role files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from afd.config import Deployment
from afd.control.address import to_connect
from afd.launch.cpus import plan_for
from afd.launch.ports import check_free, held_ports
from afd.launch.process import Command
from afd.launch.supervisor import Stage
from afd.roles import RoleSpec

# seconds from SIGTERM to SIGKILL; the gateway's is its drain and this
STOP_S = {"control": 5.0, "ffn": 5.0, "attention": 15.0, "gateway": 5.0}


@dataclass(frozen=True)
class Ports:
    """Every address that the deployment listens on, settled before anything starts."""

    gateway: int
    attention: tuple[int, ...]
    control_address: str


@contextlib.contextmanager
def held_addresses(deployment: Deployment) -> Iterator[Ports]:
    """The file's ports, or free ones where it leaves the choice; those stay ours meanwhile.

    Raises ConfigError if a port named in the file is in use.
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
    """One spec per process, in start order. Pure."""
    cpus = plan_for(deployment, cores)
    tp = deployment.ffn.tp
    base = RoleSpec("control", 0, deployment, ports.control_address, deployment.control.keys)
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


def stages(specs: Sequence[RoleSpec], run_dir: Path) -> list[Stage]:
    """Write the role files into ``run_dir`` and group the commands by role, in start order."""
    found = []
    for role, stop_s in STOP_S.items():
        commands = tuple(_command(spec, run_dir) for spec in specs if spec.role == role)
        if role == "gateway":
            stop_s += specs[0].deployment.deadlines.drain_s
        # Attention instances wait for the FFN instances before they serve, and what takes them
        # longest, importing vLLM, they can do meanwhile.
        found.append(Stage(commands, stop_s, awaited=role != "ffn"))
    return found


def _command(spec: RoleSpec, run_dir: Path) -> Command:
    file = run_dir / f"{spec.id}.json"
    spec.save(file)
    env = {
        "OMP_NUM_THREADS": str(spec.threads if spec.cpus else 1),
        "PYTHONUNBUFFERED": "1",
        # sockets and scratch files of the role end with the run directory
        "TMPDIR": str(run_dir),
    }
    argv = (sys.executable, "-m", "afd.cli", spec.role, "--role-file", str(file))
    return Command(
        spec.id, argv, env, ends_all=spec.role == "control", stateless=spec.role == "ffn"
    )


def available_cores() -> list[int]:
    """Cores this process may run on: taskset and cgroup cpusets count."""
    return sorted(os.sched_getaffinity(0))
