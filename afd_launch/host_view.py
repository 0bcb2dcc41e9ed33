"""A deployment as one of its hosts sees it: the keys that name an address have the host's own.

Every role gets this view in its role file. So the workers read ``transport.host`` and
``attention.host`` and need not know that there are several hosts. Pure functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from afd.config.deployment import PATHS, Deployment
from afd.config.hosts import CONTROL_PORT, Host
from afd.errors import ConfigError

_OF_ONE_HOST = (
    *(".".join(place) for place in PATHS),
    "attention.host",
    "transport.host",
    "transport.verbs.ports",
    "ffn.arch",
)
"""Keys whose value may differ between hosts: paths, what :func:`seen_from` sets, and what a host
sees of its own GPUs. The contract compares what is in the model and in the placement and the FP8
type that follows from the GPUs; the handshake compares the keys."""


def find_host(deployment: Deployment, name: str) -> Host:
    """Returns a host of the file. Raises ConfigError that lists the names."""
    for host in deployment.hosts:
        if host.name == name:
            return host
    names = ", ".join(host.name for host in deployment.hosts)
    if not names:
        raise ConfigError(f"--host {name}: the file has no hosts; remove --host, or add the key")
    raise ConfigError(f"--host {name} is not in the file; use one of {names}")


def control_host(deployment: Deployment) -> Host:
    """Returns the host of the control plane and the gateway. The file must name hosts."""
    wanted = deployment.control.host
    return deployment.hosts[0] if wanted is None else find_host(deployment, wanted)


def home_of(deployment: Deployment, role: str, index: int) -> str:
    """Returns the name of the host that runs this process; "" if the file names no hosts."""
    if not deployment.hosts:
        return ""
    if role not in ("attention", "ffn"):
        return control_host(deployment).name
    return next(place.name for place in deployment.places() if place.has(role, index))


def control_address(deployment: Deployment) -> str:
    """Returns ``control.address``; with hosts, auto is a fixed port of the control host."""
    wanted = deployment.control.address
    if wanted != "auto" or not deployment.hosts:
        return wanted
    address = control_host(deployment).address
    return f"tcp://{f'[{address}]' if ':' in address else address}:{CONTROL_PORT}"


def seen_from(deployment: Deployment, name: str) -> Deployment:
    """Returns the deployment as the processes on host ``name`` see it. Raises ConfigError."""
    if not name:
        return deployment
    host = find_host(deployment, name)
    transport, verbs = deployment.transport, deployment.transport.verbs
    if host.ports != "auto":
        verbs = verbs.model_copy(update={"ports": host.ports})
    return deployment.model_copy(
        update={
            "attention": deployment.attention.model_copy(update={"host": host.address}),
            "transport": transport.model_copy(update={"host": host.address, "verbs": verbs}),
        }
    )


def settings_of(deployment: Deployment) -> dict[str, Any]:
    """Returns the values that all hosts must share, by key ("attention.dtype"), JSON-ready."""
    found: dict[str, Any] = {}
    _flatten(deployment.plain(), "", found)
    for key in _OF_ONE_HOST:
        found.pop(key, None)
    return found


def _flatten(section: Mapping[str, Any], prefix: str, found: dict[str, Any]) -> None:
    for key, value in section.items():
        if isinstance(value, dict):
            _flatten(value, f"{prefix}{key}.", found)
        else:
            found[prefix + key] = value
