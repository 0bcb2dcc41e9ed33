"""Which host of a deployment file this machine is."""

from __future__ import annotations

from collections.abc import Callable

from afd.config.deployment import Deployment
from afd.errors import ConfigError
from afd_launch.addresses import is_local, own_addresses
from afd_launch.host_view import control_host, find_host


def this_host(
    deployment: Deployment, wanted: str | None, local: Callable[[str], bool] = is_local
) -> str:
    """Returns the name of the host to run here; "" if the file names no hosts.

    Without a name it is the one host whose address is local. So one service file works on all
    hosts, and no guess can be wrong: the address has to be local with --host, too.

    Args:
        wanted: the value of --host. local: whether an address is of this machine.

    Raises:
        ConfigError: no host, or several, can be meant.
    """
    if wanted is not None:
        host = find_host(deployment, wanted)
        if not local(host.address):
            raise ConfigError(
                f"host {wanted} has the address {host.address}, which is not one of this machine"
                f" ({', '.join(own_addresses()) or 'no network'}); start it there, or correct its"
                " address in hosts"
            )
    elif deployment.hosts:
        here = [host.name for host in deployment.hosts if local(host.address)]
        if len(here) != 1:
            names = ", ".join(host.name for host in deployment.hosts)
            found = f"{' and '.join(here)} have" if here else "none has"
            raise ConfigError(
                f"the file names {len(deployment.hosts)} hosts ({names}), of which {found} an"
                " address of this machine; say which one it is with --host NAME"
            )
        wanted = here[0]
    name = wanted or ""
    place = deployment.place_of(name)
    if name and not (place.attention or place.ffn or control_host(deployment).name == name):
        raise ConfigError(
            f"host {name} has nothing to run; give it attention or ffn instances, or remove it"
        )
    return name
