"""The actor that runs an instance's processes on its node. The driver decides when."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Mapping

from afd_launch.private_folder import private_folder
from afd_launch.process import Command, RoleProcess, describe_exit
from afd_launch.ray_cluster.plan import Instance

_READ = 64 * 1024


class Keeper:
    """Starts the ranks of one instance, reports their output, and ends them together.

    Ray runs its methods one at a time on the main thread of a worker process, as
    :class:`RoleProcess` needs. The processes end with this one, and a watchdog removes their files.
    """

    def __init__(self, instance: Instance, threads: int, niceness: int) -> None:
        """threads: compute threads of a rank. niceness: that ranks should have; Ray gives its
        workers 15, and only root may take that back."""
        self._instance, self._threads = instance, threads
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        self._running: list[RoleProcess] = []
        self._folder = contextlib.ExitStack()

    def start(self, files: Mapping[str, str], control: str) -> str:
        """Writes the files into a private folder and starts the ranks.

        files: text by name. Returns the address of the node that Ray has put this actor on.
        """
        import ray

        self.stop(0.0)
        address: str = ray.util.get_node_ip_address()
        # Ray kills the children of a worker that ends, and would kill the watchdog too.
        folder, watchdog = self._folder.enter_context(private_folder(detached=True))
        for name, text in files.items():
            path = folder / name
            path.touch(mode=0o600)
            path.write_text(text, encoding="utf-8")
        env = {
            "TMPDIR": str(folder),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(self._threads),
        }
        commands = self._instance.arguments(address, control, str(folder))
        for member, argv in zip(self._instance.members, commands, strict=True):
            command = Command(member, (sys.executable, "-m", "afd_launch.cli", *argv), env)
            self._running.append(RoleProcess.start(command))
            watchdog.add(self._running[-1].group)
        return address

    def poll(self) -> tuple[dict[str, bytes], tuple[str, str] | None]:
        """Returns the output since the last call, by member, and which rank ended how, if one
        did."""
        output = {process.name: self._read(process) for process in self._running}
        for process in self._running:
            if (code := process.exit_code()) is not None:
                output[process.name] += self._read(process)
                return output, (process.name, describe_exit(code))
        if not self._running:  # Ray has started this actor anew
            return output, (self._instance.name, "lost its actor")
        return output, None

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
            output[process.name] += self._read(process)
            process.close()
        self._running = []
        self._folder.close()
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
