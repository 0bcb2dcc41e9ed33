"""`afd doctor --active`: moves bytes the way a deployment would, and says what was seen."""

from __future__ import annotations

from afd.devices import DEVICES, ROCM
from afd.errors import AfdError, ConfigError
from afd.host.amd_gpus import architectures
from afd_comm import CommError, VerbsOptions
from afd_launch import echo
from afd_launch.installation import find_gpus


def active(
    device: str, listen: str | None, peer: str | None, ports: list[str], verbs_host: str
) -> int:
    """Prints what each round trip showed; returns 1 if one failed.

    Args:
        device: a name of :data:`afd.devices.DEVICES`, or "auto": this host's GPUs and its CPU.
        listen, peer: HOST:PORT of this or of the other host of a round trip between two.
        ports, verbs_host: RDMA ports, and the address of their handshake.
    """
    if listen is not None:
        chosen = _one(device)
        print(f"waiting at {listen} with slots on {DEVICES[chosen].region_device}", flush=True)
        echo.listen(listen, chosen, _verbs(ports, verbs_host))
        print("served one round trip", flush=True)
        return 0
    if peer is not None:
        found = echo.to_host(peer, _one(device), _verbs(ports, verbs_host))
        print(f"ok    {'to ' + peer:16} {found.text}", flush=True)
        return 0
    failed = False
    for name in [device] if device != "auto" else ["cpu", *_gpus()]:
        try:
            line = f"ok    {'slots on ' + name:16} {echo.on_this_host(name).text}"
        except (AfdError, CommError) as error:
            line, failed = f"bad   {'slots on ' + name:16} {error}", True
        print(line, flush=True)
    return int(failed)


def _gpus() -> list[str]:
    kind = {"nvidia": "cuda", "amd": ROCM.name}.get(find_gpus().kind)
    return [kind] if kind is not None else []


def _one(device: str) -> str:
    if device != "auto":
        return device
    return ROCM.name if architectures() else (_gpus() or ["cpu"])[0]


def _verbs(ports: list[str], host: str) -> VerbsOptions:
    if not ports:
        raise ConfigError("a round trip between hosts needs --ports, such as --ports mlx5_0:1")
    return VerbsOptions(ports=ports, host=host)
