"""Whether this machine can be a host of the deployment, and which RDMA ports its roles get.

Facts are read first (:func:`look`); everything else is pure. A mistake is one sentence with the
host, the cause and the remedy, before any role starts.
"""

from __future__ import annotations

import ctypes.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from afd.config.deployment import Deployment
from afd.config.resolve import Resolved, resolve
from afd.config.roles import RoleSpec, gpu_processes
from afd.config.transport import Verbs
from afd.control.messages import Rail
from afd.devices import CUDA, device_named
from afd.errors import ConfigError
from afd_launch import rdma
from afd_launch.host_view import find_host
from afd_launch.installation import find_gpus
from afd_launch.pcie import nearest_ports, read_gpus, usable_ports
from afd_launch.rdma import PciPlace, RdmaPort


@dataclass(frozen=True)
class HostFacts:
    """What this machine has.

    gpus: how many may be used. gpu_places: all of its GPUs, in the order of their numbers.
    library: file of libibverbs, None if absent. openable: RDMA devices may be used.
    locked_bytes: -1 for no limit. gpu_direct: GPU memory can be registered with a NIC.
    """

    gpus: int = 0
    gpu_places: tuple[PciPlace, ...] = ()
    ports: tuple[RdmaPort, ...] = ()
    library: str | None = None
    openable: bool = False
    locked_bytes: int = -1
    gpu_direct: bool = False


def look() -> HostFacts:
    return HostFacts(
        find_gpus().count,
        read_gpus(),
        rdma.read_ports(),
        ctypes.util.find_library("ibverbs"),
        rdma.devices_openable(),
        rdma.locked_bytes(),
        rdma.has_peermem() or rdma.has_dma_buf(),
    )


def prepared(specs: Sequence[RoleSpec], facts: HostFacts) -> list[RoleSpec]:
    """Returns the specs of this host's roles, with their RDMA ports.

    Raises:
        ConfigError: this machine lacks what they need.
    """
    check_gpus(specs[0].deployment, specs[0].host, facts)
    found = with_ports(specs, facts)
    if not _own_library(specs):
        check_rdma(found, facts)
    return found


def _own_library(specs: Sequence[RoleSpec]) -> bool:
    """Whether the file names a libibverbs of its own. sysfs does not list the ports of that one."""
    library = specs[0].deployment.transport.verbs.library
    return bool(library != Verbs.model_fields["library"].default)


def check_gpus(deployment: Deployment, name: str, facts: HostFacts) -> None:
    """Raises ConfigError if the host has too few GPUs. name: "" if the file names no hosts."""
    if not name:
        return
    processes = len(gpu_processes(deployment, name))
    needed = min(processes, deployment.gpus or processes)
    accelerators = find_host(deployment, name).accelerators
    declared = accelerators.count if accelerators else 0
    if processes and facts.gpus < max(needed, declared):
        said = f"the file gives it {declared}" if declared >= needed else f"it needs {needed}"
        on_gpu = (deployment.attention.device, deployment.ffn.device)
        kind = next(d for d in map(device_named, on_gpu) if d.visible_variables)
        where = f"{kind.listed_by}, {kind.visible_variables[0]}"
        raise ConfigError(
            f"host {name} has {facts.gpus} usable GPUs, but {said}; look for the missing ones"
            f" ({where}), or correct its accelerators.count"
        )


def with_ports(
    specs: Sequence[RoleSpec], facts: HostFacts, environment: Mapping[str, str] = os.environ
) -> list[RoleSpec]:
    """Returns the specs with the RDMA ports of each process, where the file does not name them.

    A process with a GPU gets the ports nearest to it, other processes all of them. Without a usable
    port, backend auto uses tcp.
    """
    deployment = specs[0].deployment
    name, transport = specs[0].host, deployment.transport
    chosen = transport.backend in ("auto", "verbs") and not transport.verbs.ports
    if not name or not chosen or find_host(deployment, name).ports != "auto":
        return list(specs)
    rails = usable_ports(facts.ports)[:8]
    near = nearest_ports(facts.gpu_places, facts.ports)
    processes = gpu_processes(deployment, name)

    def ports_of(spec: RoleSpec) -> tuple[RdmaPort, ...]:
        own = (spec.role, spec.index, spec.rank)
        if own not in processes:
            return rails
        count = min(deployment.gpus or len(processes), len(processes))
        gpu = _physical(processes.index(own) % count, spec, environment)
        return near[gpu] if gpu is not None and gpu < len(near) else rails

    return [
        _with(spec, ports_of(spec)) if spec.role in ("attention", "ffn") else spec for spec in specs
    ]


def _with(spec: RoleSpec, ports: tuple[RdmaPort, ...]) -> RoleSpec:
    transport = spec.deployment.transport
    verbs = transport.verbs.model_copy(update={"ports": tuple(port.name for port in ports)})
    updated = {"transport": transport.model_copy(update={"verbs": verbs})}
    return replace(spec, deployment=spec.deployment.model_copy(update=updated))


def _physical(gpu: int, spec: RoleSpec, environment: Mapping[str, str]) -> int | None:
    """Number of a GPU among all of the machine; None if the environment names it otherwise."""
    pool = spec.deployment.attention if spec.role == "attention" else spec.deployment.ffn
    device = device_named(pool.device)
    if device.hiding_variable is not None and device.hiding_variable in environment:
        return None
    given = [environment[name] for name in device.visible_variables if name in environment]
    if not given:
        return gpu
    names = given[0].split(",")
    return int(names[gpu]) if gpu < len(names) and names[gpu].isdigit() else None


def ports_in_use(specs: Iterable[RoleSpec]) -> tuple[str, ...]:
    """Returns the RDMA ports of the roles of this host, each once, in rail order."""
    found: dict[str, None] = {}
    for spec in specs:
        if spec.role in ("attention", "ffn"):
            keywords = spec.deployment.transport.verbs_keywords(spec.role)
            found |= dict.fromkeys(keywords["ports"] if keywords else ())
    return tuple(name if ":" in name else f"{name}:1" for name in found)


def rails_of(specs: Sequence[RoleSpec], facts: HostFacts) -> tuple[Rail, ...]:
    """Returns what the other hosts compare with their own ports."""
    if _own_library(specs):
        return ()
    by_name = {port.name: port for port in facts.ports}
    index = specs[0].deployment.transport.verbs.gid_index
    rails = []
    for name in ports_in_use(specs):
        port = by_name[name]
        gid = port.gid(None if index == "auto" else index)
        rails.append(Rail(name, port.link, gid.kind if gid else "", port.mtu))
    return tuple(rails)


def check_rdma(specs: Sequence[RoleSpec], facts: HostFacts) -> None:
    """Raises ConfigError if a port that the roles shall use, or what it needs, is missing."""
    name, deployment = specs[0].host, specs[0].deployment
    wanted = ports_in_use(specs)
    if not wanted:
        if name and deployment.transport.backend == "verbs":
            raise ConfigError(
                f"host {name} has no RDMA port that is up, but transport.backend is verbs; see"
                " afd doctor there, or use backend auto"
            )
        return
    reason = next(_port_problems(specs, wanted, facts), None)
    if reason is None and facts.library is None:
        reason = "libibverbs is not installed; run: apt-get install libibverbs1"
    if reason is None and not facts.openable:
        reason = (
            f"{rdma.DEVICES}/uverbs* cannot be opened by this user; add it to the group of the"
            f" files, or give the container --device {rdma.DEVICES}"
        )
    if reason is None and (need := locked_need(specs, len(wanted))) > facts.locked_bytes >= 0:
        reason = (
            f"a process may lock {facts.locked_bytes / 2**20:.0f} MiB, but RDMA registers"
            f" {need / 2**20:.0f} MiB; set ulimit -l unlimited (systemd: LimitMEMLOCK=infinity)"
        )
    on_gpu = deployment.attention.device == CUDA.name or deployment.ffn.device == CUDA.name
    if (
        reason is None
        and on_gpu
        and not facts.gpu_direct
        and deployment.transport.backend != "auto"
    ):
        reason = (
            "GPU memory cannot be registered with a NIC, because nvidia-peermem is not loaded and"
            " the driver exports no dma-buf; run: modprobe nvidia-peermem, or install NVIDIA's open"
            " kernel modules on Linux 5.12 or later"
        )
    if reason is not None:
        raise ConfigError(f"host {name}: {reason}" if name else reason)


def _port_problems(
    specs: Sequence[RoleSpec], wanted: Sequence[str], facts: HostFacts
) -> Iterator[str]:
    by_name = {port.name: port for port in facts.ports}
    index = specs[0].deployment.transport.verbs.gid_index
    for name in wanted:
        port = by_name.get(name)
        if port is None:
            known = ", ".join(by_name) or "none"
            yield f"there is no RDMA port {name} (there are: {known}); correct the list of ports"
        elif port.state != "ACTIVE":
            yield (
                f"RDMA port {name} is {port.state.lower() or 'not up'}; check its cable and its"
                " interface (ip link, rdma link), or remove it from the list of ports"
            )
        elif port.gid(None if index == "auto" else index) is None:
            where = "no address" if index == "auto" else f"no address at gid_index {index}"
            yield (
                f"RDMA port {name} has {where}; give its interface {port.interface or ''} an IP"
                " address, or choose an index that afd doctor lists"
            )


def locked_need(specs: Sequence[RoleSpec], ports: int) -> int:
    """Returns the bytes that the largest process registers on ``ports`` NICs from host memory.

    It registers its receive slots and one send buffer per link, on each NIC. Slots in GPU memory do
    not count, because the limit is for host memory.
    """
    resolved: Resolved | None = None
    most = 0
    for spec in specs:
        if spec.role not in ("attention", "ffn"):
            continue
        pool = spec.deployment.attention if spec.role == "attention" else spec.deployment.ffn
        if not device_named(pool.device).host_memory:
            continue
        resolved = resolved or resolve(spec.deployment)
        slots, a2f, f2a = resolved.slots, resolved.a2f.nbytes, resolved.f2a.nbytes
        to_ffn = slots.ffn_ranks * (slots.max_depth + 1) * a2f
        to_attention = slots.attention_ranks * slots.max_depth * f2a
        received = slots.attention_region_slots * f2a, slots.ffn_region_slots * a2f
        sides = (received[0] + to_ffn, received[1] + to_attention)
        most = max(most, sides[0 if spec.role == "attention" else 1])
    return most * ports
