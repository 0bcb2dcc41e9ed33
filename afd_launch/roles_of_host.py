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
from afd_gateway.inherited import Inherited
from afd_launch.cpus import plan_for
from afd_launch.host_view import control_address, home_of
from afd_launch.lending import lend
from afd_launch.names import numeric, resolved
from afd_launch.process import Command
from afd_launch.standby import ATTENTION, FFN
from afd_launch.supervisor import Stage

# seconds from SIGTERM to SIGKILL; the gateway gets deadlines.drain_s in addition
STOP_S = {"control": 5.0, "ffn": 5.0, "prefill": 15.0, "attention": 15.0, "gateway": 5.0}


@dataclass(frozen=True)
class Ports:
    """Every address that this host listens on, chosen before anything starts.

    gateway: 0 on a host without the gateway. attention: by number of the instance; 0 for instances
    of other hosts. control_address: with an IP address, so that no role has to resolve a name.
    prefill: of colocated prefill instances. attention_transfer, prefill_transfer: RoleSpec's
    ``transfer_port`` of the same instances; () without prefill instances.
    """

    gateway: int
    attention: tuple[int, ...]
    control_address: str
    prefill: tuple[int, ...] = ()
    attention_transfer: tuple[int, ...] = ()
    prefill_transfer: tuple[int, ...] = ()


@contextlib.contextmanager
def held_addresses(deployment: Deployment, host: str = "") -> Iterator[Ports]:
    """The ports of the file; free ports, which stay reserved meanwhile, for those that it omits.

    Args:
        deployment: as seen from ``host``, the name of this host; "" if the file names none.

    Raises:
        ConfigError: a port of the file is in use, or a name of it is not resolved.
    """
    gateway, attention = deployment.gateway, deployment.attention
    place = deployment.place_of(host)
    local = (*place.attention, *place.spare)
    leads = home_of(deployment, "control", 0) == host
    resolved(attention.host, "attention.host")
    if leads and gateway.host:
        resolved(gateway.host, "gateway.host")
    addresses = [gateway.host, "127.0.0.1"] if leads else []
    prefill = deployment.prefill
    wanted = [*addresses, *[attention.host] * len(local), *[prefill.host] * prefill.colocated]
    with held_ports(wanted) as free, _transfer_ports(deployment) as transfer:
        api_ports = [0] * attention.capacity
        for index, spare in zip(local, free[len(addresses) :], strict=False):
            setting = "attention.port" + (f" (instance {index})" if index else "")
            api_ports[index] = attention.api_ports()[index] or spare
            check_free(attention.host, api_ports[index], setting)
        address = control_address(deployment)
        if address != "auto":
            address = numeric(address, "control.address")
        port = 0
        if leads:
            port = gateway.port or free[0]
            check_free(gateway.host, port, "gateway.port (or --port)")
            if address == "auto":
                address = f"tcp://127.0.0.1:{free[1]}"
            else:
                endpoint = to_connect(address)
                check_free(endpoint.host, endpoint.port, "control.address")
        prefill_ports = []
        for index, given in enumerate(prefill.api_ports()):
            prefill_ports.append(given or free[len(addresses) + len(local) + index])
            check_free(prefill.host, prefill_ports[-1], f"prefill.port (instance {index})")
        yield Ports(port, tuple(api_ports), address, tuple(prefill_ports), *transfer)


@contextlib.contextmanager
def _transfer_ports(deployment: Deployment) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Holds ``transfer_port`` of the attention and the prefill instances; none without prefill."""
    prefill, attention = deployment.prefill, deployment.attention
    count = attention.capacity if prefill.instances else 0
    with held_ports([attention.host] * count + [prefill.host] * prefill.colocated) as free:
        yield tuple(free[:count]), tuple(free[count:])


def role_specs(
    deployment: Deployment, ports: Ports, cores: Sequence[int], host: str = ""
) -> list[RoleSpec]:
    """Returns one spec per process of this host, in start order, without keys. Pure.

    The processes of instances that can be added are among them.

    deployment, host: as for :func:`held_addresses`.
    """
    cpus = plan_for(deployment, cores, host)
    tp = deployment.ffn.tp
    place = deployment.place_of(host)
    base = RoleSpec("control", 0, deployment, ports.control_address, host=host)
    leads = home_of(deployment, "control", 0) == host
    made = [
        *([base] if leads else []),
        *(
            replace(base, role="ffn", index=j, rank=rank, cpus=cpus.ffn[j * tp + rank])
            for j in (*place.ffn, *place.spare_ffn)
            for rank in range(tp)
        ),
        *(
            replace(base, role="prefill", index=i, api_port=port, transfer_port=transfer)
            for i, (port, transfer) in enumerate(
                zip(ports.prefill, ports.prefill_transfer, strict=True)
            )
        ),
        *(
            replace(
                base,
                role="attention",
                index=i,
                cpus=cpus.attention[i],
                api_port=ports.attention[i],
                transfer_port=ports.attention_transfer[i] if ports.attention_transfer else 0,
            )
            for i in (*place.attention, *place.spare)
        ),
        *(
            replace(
                base,
                role="gateway",
                index=i,
                api_port=ports.gateway,
                prefill_ports=ports.prefill,
            )
            for i in range(deployment.gateway.processes if leads else 0)
        ),
    ]
    return lend(made)


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


def stages(specs: Sequence[RoleSpec], run_dir: Path, port: Inherited | None = None) -> list[Stage]:
    """Writes the role files into ``run_dir`` and returns the commands by role, in start order.

    port: what the gateway processes inherit.
    """
    found = []
    for role, stop_s in STOP_S.items():
        commands = tuple(_command(spec, run_dir) for spec in specs if spec.role == role)
        if role == "gateway":
            if port is not None:
                commands = tuple(_with_port(command, port) for command in commands)
            stop_s += specs[0].deployment.deadlines.drain_s
        # Attention instances start without waiting for FFN and prefill instances: importing vLLM
        # takes long, and they wait for the FFN instances themselves before they serve.
        awaited = role not in ("ffn", "prefill")
        if commands or role != "prefill":
            found.append(Stage(commands, stop_s, awaited=awaited, first=role == "control"))
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
    if spec.lent:  # compute threads that spin would take the cores of the side whose turn it is
        env["OMP_WAIT_POLICY"] = "passive"
    argv = (sys.executable, "-m", "afd_launch.cli", spec.role, "--role-file", str(file))
    attention, ffn = spec.deployment.attention, spec.deployment.ffn
    device = {"attention": attention.device, "ffn": ffn.device}.get(spec.role)
    started = {"attention": attention.instances, "ffn": ffn.instances}
    return Command(
        spec.id,
        argv,
        env,
        ends_all=spec.role == "control",
        stateless=spec.role == "ffn",
        standby=_standby(spec),
        # Only where forks were seen to work: a restart that fails is tried again, a start is not.
        forked=device == "cpu" and bool(_standby(spec)),
        holds_requests=spec.role == "attention",
        spare=spec.index >= started.get(spec.role, spec.index + 1),
    )


def _standby(spec: RoleSpec) -> tuple[str, ...]:
    """Returns ``Command.standby`` of a role."""
    setting = spec.deployment.restart.standby
    if spec.role == "ffn" and setting:
        return FFN
    return ATTENTION if spec.role == "attention" and setting is True else ()


def _with_port(command: Command, port: Inherited) -> Command:
    env = {**command.env, **port.environment()}
    return replace(command, env=env, descriptors=port.descriptors)


def available_cores() -> list[int]:
    """Returns the cores this process may run on (as limited by taskset or a cgroup)."""
    return sorted(os.sched_getaffinity(0))
