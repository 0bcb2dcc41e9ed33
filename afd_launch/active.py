"""`afd doctor --active`: moves bytes the way a deployment would, and says what was seen."""

from __future__ import annotations

from pathlib import Path

from afd.devices import DEVICES, ROCM
from afd.errors import AfdError
from afd.host.amd_gpus import architectures
from afd_comm import CommError, VerbsOptions
from afd_launch import echo, two_hosts
from afd_launch.installation import find_gpus


def active(
    device: str,
    listen: str | None,
    peer: str | None,
    ports: list[str],
    verbs_host: str,
    model: Path | None = None,
) -> int:
    """Prints what each round trip showed; returns 1 if one failed or two hosts do not fit.

    Args:
        device: a name of :data:`afd.devices.DEVICES`, or "auto": this host's GPUs and its CPU.
        listen, peer: HOST:PORT of this or of the other host of a comparison of two.
        ports, verbs_host: RDMA ports, and the address of their handshake; none: over TCP only.
        model: a checkpoint that both hosts should have.
    """
    verbs = VerbsOptions(ports=ports, host=verbs_host) if ports else None
    if listen is not None:
        chosen = _one(device)
        print(f"waiting at {listen} with slots on {DEVICES[chosen].region_device}", flush=True)
        two_hosts.listen(listen, chosen, verbs, model)
        print("served one host", flush=True)
        return 0
    if peer is not None:
        rows = two_hosts.compare_with(peer, _one(device), verbs, model)
        print("\n".join(map(str, rows)), flush=True)
        return int(any(row.level == "bad" for row in rows))
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
