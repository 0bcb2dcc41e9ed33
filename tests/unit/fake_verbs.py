"""A fake libibverbs without hardware (comm/tests/fake_ibverbs.cc), for the verbs backend."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from afd_comm import VerbsOptions

SOURCE = Path(__file__).parents[2] / "comm" / "tests" / "fake_ibverbs.cc"
PORTS = ["fake0", "fake1:1"]


class FakeVerbs:
    """Two devices, fake0 and fake1. Faults last until ``heal``."""

    def __init__(self, library: Path) -> None:
        self.library = str(library)
        self._lib = ctypes.CDLL(self.library)

    def options(self, **changes: object) -> VerbsOptions:
        given = {"ports": PORTS, "host": "127.0.0.1", "library": self.library, **changes}
        return VerbsOptions(**given)

    def port(self, device: str, *, up: bool) -> None:
        self._lib.fake_port(device.encode(), int(up))

    def lose_acks(self, device: str, lose: bool = True) -> None:
        """Data arrives, but the sender gets an error instead of an acknowledgement."""
        self._lib.fake_lose_acks(device.encode(), int(lose))

    def mute(self, device: str, on: bool = True) -> None:
        """The NIC neither acknowledges nor fails what it is given."""
        self._lib.fake_mute(device.encode(), int(on))

    def delay_us(self, us: int) -> None:
        self._lib.fake_delay_us(us)

    def stop_receivers(self, stop: bool = True) -> None:
        """Data is acknowledged, but the receiver's thread does not see it."""
        self._lib.fake_stop_receivers(int(stop))

    def damage_record(self, at: int, word: int) -> None:
        """Replaces the word at byte ``at`` of the next message's record (verbs_wire.h)."""
        self._lib.fake_damage_record(at, ctypes.c_uint32(word))

    def refuse_memory(self, errno: int) -> None:
        self._lib.fake_refuse_memory(errno)

    def devices(self, count: int) -> None:
        self._lib.fake_devices(count)

    @property
    def queue_pairs(self) -> int:
        return self._lib.fake_queue_pairs()

    def heal(self) -> None:
        for device in ("fake0", "fake1"):
            self.port(device, up=True)
            self.lose_acks(device, False)
            self.mute(device, False)
        self.delay_us(0)
        self.stop_receivers(False)
        self.damage_record(-1, 0)
        self.refuse_memory(0)
        self.devices(2)


@functools.cache
def _compiled() -> bytes:
    """The library; compiled once per test run, which takes more than a second."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("building the fake libibverbs needs a C++ compiler")
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libfake_ibverbs.so"
        command = [compiler, "-std=c++17", "-O0", "-shared", "-fPIC", "-pthread"]
        subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True, timeout=120)
        return library.read_bytes()


@contextmanager
def built_fake(folder: Path) -> Iterator[FakeVerbs]:
    """A fake with devices of its own; skips the test if there is no compiler."""
    library = folder / "libfake_ibverbs.so"
    library.write_bytes(_compiled())
    fake = FakeVerbs(library)
    yield fake
    fake.heal()
