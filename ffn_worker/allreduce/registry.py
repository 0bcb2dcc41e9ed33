"""All-reduce backends by name. A new one is one file and one line in BACKENDS. No torch."""

from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

from afd.config.choices import Choice
from afd.devices import device_named
from afd.errors import ConfigError

if TYPE_CHECKING:
    from ffn_worker.allreduce.base import Collective, Setup


class Make(Protocol):
    """Makes a backend's :class:`Collective`; blocks until all ranks are there."""

    def __call__(self, setup: "Setup", table: Path | None) -> "Collective":
        """table: the crossover table of quickreduce; None: the device's own.

        Raises:
            ConfigError: the backend cannot run here, or not in this format.
            PeerLost, DeadlineExceeded: the other ranks did not come.
        """


@dataclass(frozen=True)
class Backend:
    """One all-reduce backend.

    target: ``module:function`` of its :class:`Make`, imported when the backend is used.
    devices: names of the devices that it runs on. instead: what to use on another device.
    """

    name: str
    target: str
    devices: tuple[str, ...]
    instead: str

    def make(self, setup: "Setup", table: Path | None = None) -> "Collective":
        """See :class:`Make`."""
        if setup.device.type not in {device_named(name).torch_type for name in self.devices}:
            where = "CPUs" if "cpu" in self.devices else "GPUs"
            raise ConfigError(
                f"the all-reduce {self.name} runs on {where}, not on {setup.device};"
                f" use {self.instead}"
            )
        make: Make = resolve_name(self.target)
        return make(setup, table)


_ROOM, _GPU = "ffn_worker.allreduce", ("cuda", "rocm")
_ALL = (
    Backend("gloo", f"{_ROOM}.gloo:make", ("cpu",), instead="nccl or quickreduce"),
    Backend("nccl", f"{_ROOM}.nccl:make", _GPU, instead="gloo"),
    Backend("quickreduce", f"{_ROOM}.quickreduce:make", _GPU, instead="gloo"),
    Backend("aiter_quickreduce", f"{_ROOM}.aiter_quickreduce:make", ("rocm",), instead="gloo"),
)
BACKENDS = {backend.name: backend for backend in _ALL}

CHOICES = (Choice("auto"), *(Choice(backend.name, backend.devices) for backend in _ALL))
"""Values of ``ffn.reduce_backend``."""
