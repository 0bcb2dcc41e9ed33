"""`afd doctor --active`: moves bytes the way a deployment would, and says what was seen."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from afd.devices import DEVICES, ROCM, device_named
from afd.errors import AfdError
from afd.host.amd_gpus import architectures
from afd_comm import CommError
from afd_launch import echo, parity, reduce_check, two_hosts
from afd_launch.findings import Measured, Row, judged, limits_of, worst
from afd_launch.installation import find_gpus
from afd_launch.rails import Rails

BETWEEN = ("tcp", "rdma")


@dataclass(frozen=True)
class Request:
    """The options of the command.

    device: a name of :data:`afd.devices.DEVICES`, or "auto": this host's GPUs and its CPU.
    inside: checks inside of this host too, when there is a peer. listen, peer: HOST:PORT of this or
    of the other host. model: a checkpoint that both hosts should have. only: of ``CHECKS``; (): all
    of them. seconds: what each rate takes, about. expect: NAME=VALUE. save, against: files.
    """

    device: str = "auto"
    inside: bool = True
    listen: str | None = None
    peer: str | None = None
    rails: Rails = field(default_factory=Rails)
    model: Path | None = None
    whole_files: bool = False
    only: tuple[str, ...] = ()
    seconds: float = 1.0
    expect: tuple[str, ...] = ()
    save: Path | None = None
    against: Path | None = None


def active(request: Request) -> int:
    """Prints a line per check; returns 1 if one is bad.

    Raises:
        ConfigError: an option is wrong, or the checkpoint cannot be read.
    """
    limits = limits_of(request.expect)
    if request.device != "auto":
        device_named(request.device)
    host = two_hosts.Host(
        _one(request.device), request.rails, request.model, request.whole_files, request.seconds
    )
    rows: list[Row] = []
    measured: list[Measured] = []
    if request.listen is None and (request.inside or request.peer is None):
        rows, measured = inside(request, limits)
    if request.listen is not None:
        where = DEVICES[host.device].region_device
        print(f"waiting at {request.listen} with slots on {where}", flush=True)
        status = two_hosts.listen(request.listen, host)
        print("served one host", flush=True)
        return status
    if request.peer is not None:
        try:
            found = two_hosts.compare_with(request.peer, host, limits, set(request.only or BETWEEN))
        except AfdError:
            with suppress(OSError):
                two_hosts.say_end(request.peer, 2)
            raise
        print("\n".join(map(str, found.rows)), flush=True)
        rows, measured = [*rows, *found.rows], [*measured, *found.measured]
        two_hosts.say_end(request.peer, worst(rows))
    if request.against is not None:
        compared = parity.against(request.against, measured, limits)
        print("beside bare metal:", *compared, sep="\n", flush=True)
        rows += compared
    if request.save is not None:
        parity.save(request.save, measured)
    return worst(rows)


def inside(request: Request, limits: Mapping[str, float]) -> tuple[list[Row], list[Measured]]:
    """The checks inside of this host; prints each line when it is known."""
    only = request.only or CHECKS
    rows: list[Row] = []
    measured: list[Measured] = []
    names = [request.device] if request.device != "auto" else ["cpu", *_gpus()]
    for name in names:
        on_gpu = not device_named(name).host_memory
        wanted = {
            "slots": True,
            "copy": on_gpu,
            "all-reduce": on_gpu or names == [name],  # among GPUs, where there are any
        }
        for check, applies in wanted.items():
            if check not in only or not applies:
                continue
            found, numbers = _INSIDE[check](name, request.seconds)
            found += [judged(one, limits) for one in numbers if check != "slots"]
            rows += found
            measured += numbers
            print("\n".join(map(str, found)), flush=True)
    return rows, measured


Outcome = tuple[list[Row], list[Measured]]
"""Lines that are not measurements, and measurements."""


def _slots(name: str, seconds: float) -> Outcome:
    what = f"slots on {name}"
    try:
        found = echo.on_this_host(name)
    except (AfdError, CommError) as error:
        remedy = "see `afd doctor` for the driver, and run both processes as the same user"
        return [Row("bad", what, str(error), "bytes come back", remedy)], []
    # The first round touches the memory.
    measured = Measured("slots_gbytes", what, found.gbytes[1:])
    return [Row("ok", what, found.text, "bytes come back")], [measured]


def _copies(name: str, seconds: float) -> Outcome:
    what = "copy engine"
    if importlib.util.find_spec("torch") is None:
        return [Row("note", what, "not measured", "torch", "install torch to measure it")], []
    from afd_launch import copy_engine_torch

    try:
        return [], copy_engine_torch.measure(name)
    except (AfdError, CommError, RuntimeError) as error:  # torch's own errors are RuntimeErrors
        remedy = "see the line of the slots, and `afd doctor` for the driver"
        return [Row("bad", what, str(error).splitlines()[0], "rounds end", remedy)], []


def _sums(name: str, seconds: float) -> Outcome:
    try:
        found = reduce_check.measure(name, seconds)
    except AfdError as error:
        return [Row("bad", "all-reduce", str(error), "right sums", reduce_check.REMEDY)], []
    return ([found], []) if isinstance(found, Row) else ([], found)


_INSIDE: dict[str, Callable[[str, float], Outcome]] = {
    "slots": _slots,
    "copy": _copies,
    "all-reduce": _sums,
}
CHECKS = (*_INSIDE, *BETWEEN)


def _gpus() -> list[str]:
    kind = {"nvidia": "cuda", "amd": ROCM.name}.get(find_gpus().kind)
    return [kind] if kind is not None else []


def _one(device: str) -> str:
    if device != "auto":
        return device
    return ROCM.name if architectures() else (_gpus() or ["cpu"])[0]
