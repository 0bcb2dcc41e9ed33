"""The actor that runs an instance's processes on its node. The driver decides when."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from afd_launch.process import Command, RoleProcess, describe_exit
from afd_launch.ray_cluster.plan import Instance

_READ = 64 * 1024


class Keeper:
    """Starts the ranks of one instance, reports their output, and ends them together.

    Ray runs its methods one at a time on the main thread of a worker process, as
    :class:`RoleProcess` needs. The processes end with this one.
    """

    def __init__(self, instance: Instance) -> None:
        self._instance = instance
        self._running: list[RoleProcess] = []
        self._folder: Path | None = None

    def node_address(self) -> str:
        """The address of the node that Ray has put this actor on."""
        import ray

        address: str = ray.util.get_node_ip_address()
        return address

    def start(self, files: Mapping[str, str], address: str, control: str) -> list[int]:
        """Writes the files into a private folder and starts the ranks. Returns their pids.

        files: text by name. address: of this node.
        """
        self.stop(0.0)
        self._folder = Path(tempfile.mkdtemp(prefix=f"afd-ray-{self._instance.name}-"))
        for name, text in files.items():
            path = self._folder / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        commands = self._instance.arguments(address, control, str(self._folder))
        env = {"TMPDIR": str(self._folder), "PYTHONUNBUFFERED": "1"}
        self._running = [
            RoleProcess(Command(member, (sys.executable, "-m", "afd_launch.cli", *argv), env))
            for member, argv in zip(self._instance.members, commands, strict=True)
        ]
        return [process.group for process in self._running]

    def poll(self) -> tuple[dict[str, bytes], str]:
        """Returns the output since the last call, by member, and how a rank ended; "" if none
        did."""
        output = {process.name: self._read(process) for process in self._running}
        for process in self._running:
            if (code := process.exit_code()) is not None:
                output[process.name] += self._read(process)
                return output, f"{process.name} {describe_exit(code)}"
        return output, "" if self._running else f"{self._instance.name} runs no process"

    def stop(self, seconds: float) -> dict[str, bytes]:
        """Ends all ranks: SIGTERM, and after ``seconds`` SIGKILL. Returns their last output."""
        for process in self._running:
            process.signal(signal.SIGTERM if seconds else signal.SIGKILL)
        ends = time.monotonic() + seconds
        output = {process.name: b"" for process in self._running}
        killed = not seconds
        while not all([process.gone() for process in self._running]):
            for process in self._running:  # a full pipe would keep it from ending
                output[process.name] += self._read(process)
            if not killed and time.monotonic() > ends:
                killed = True
                for process in self._running:
                    process.signal(signal.SIGKILL)
            time.sleep(0.05)
        for process in self._running:
            process.close()
        self._running = []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        return output

    def _read(self, process: RoleProcess) -> bytes:
        found = b""
        while True:
            try:
                data = os.read(process.output, _READ)
            except BlockingIOError:
                return found
            found += data
            if not data:
                return found
