"""A running deployment as the faults see it: its processes, and whether it is whole."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from afd.control import operator
from afd.control.keys import ClientKeys
from afd.control.local_keys import operator_keys
from afd.control.messages import Member
from afd.errors import AfdError
from afd_bench.servers import Server
from afd_launch.come_and_go import Operator

_POLL_S = 0.05
_IMPORTED_S = 3.0
"""CPU time that a process has used that has imported vLLM, at least."""


@dataclass(frozen=True)
class Subject:
    """A deployment that ``afd serve`` runs on this host."""

    server: Server

    @property
    def keys(self) -> ClientKeys:
        return operator_keys(self.server.control)

    def leaders(self) -> dict[str, psutil.Process]:
        """Returns the process that the supervisor started for each role, by member id.

        A fork of a process that waited is found once it is registered.
        """
        found = {}
        registered = self._groups()
        for child in psutil.Process(self.server.pid).children():
            with contextlib.suppress(psutil.Error):
                words = child.cmdline()
                if "--role-file" in words:
                    file = words[words.index("--role-file") + 1]
                    found[os.path.basename(file).removesuffix(".json")] = child
                elif child.pid in registered:
                    found[registered[child.pid]] = child
        return found

    def starting_ffn(self) -> list[psutil.Process]:
        """FFN processes that are not registered."""
        registered = self._groups()
        found = self._children("afd_launch.ffn_standby", "cli ffn")
        return [one for one in found if one.pid not in registered and not _takes_orders(one)]

    def waiting_attention(self) -> list[psutil.Process]:
        """The process that waits to replace attention instances."""
        return [one for one in self._children("afd_launch.attention_standby") if _takes_orders(one)]

    def await_waiting_attention(self, deadline_s: float) -> psutil.Process:
        """Returns the process that waits to replace attention instances, once it has imported vLLM.

        It has then used no time for a second. Raises AfdError if that is not so in time.
        """
        end = time.monotonic() + deadline_s
        used = -1.0
        while time.monotonic() < end:
            for process in self.waiting_attention():
                with contextlib.suppress(psutil.Error):
                    now = sum(process.cpu_times()[:2])
                    if now == used and now > _IMPORTED_S:
                        return process
                    used = now
            time.sleep(1.0)
        raise AfdError(f"no process waits after {deadline_s:g} s")

    def _children(self, *words: str) -> list[psutil.Process]:
        found = []
        for child in psutil.Process(self.server.pid).children():
            with contextlib.suppress(psutil.Error):
                line = " ".join(child.cmdline())
                if any(word in line for word in words):
                    found.append(child)
        return found

    def _groups(self) -> dict[int, str]:
        """Returns the registered members by the process that the supervisor started for them."""
        found: dict[int, str] = {}
        for member in self._members():  # the ranks of an instance are one group, of rank 0's name
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                group = os.getpgid(member.pid)
                found[group] = min(member.id, found.get(group, member.id))
        return found

    def member_pid(self, member: str) -> int:
        """The process that is registered under this id; of an attention instance, its engine."""
        found: list[int] = [m.pid for m in self._members() if m.id == member]
        if not found:
            raise AfdError(f"{member} is not registered")
        return found[0]

    def generation(self, member: str) -> int:
        """0 while it is not registered."""
        return next((m.generation for m in self._members() if m.id == member), 0)

    def signal_group(self, member: str, number: signal.Signals) -> None:
        """Sends a signal to every process of a role."""
        os.killpg(self.leaders()[member].pid, number)

    @contextlib.contextmanager
    def stopped(self, member: str) -> Iterator[None]:
        """Stops all processes of a role inside the block."""
        group = self.leaders()[member].pid
        os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it was killed meanwhile
                os.killpg(group, signal.SIGCONT)

    def is_whole(self) -> bool:
        """Whether every expected member is ready, and healthy if it is an attention instance."""
        try:
            with urllib.request.urlopen(f"{self.server.url}/health", timeout=5) as answer:
                members = json.load(answer)["members"]
        except (OSError, ValueError):
            return False
        states = [(member["state"], member["health"] or "healthy") for member in members]
        return all(state == ("ready", "healthy") for state in states)

    def newest(self, role: str) -> int:
        """The largest generation of the members of a role; 0 without any."""
        return max((m.generation for m in self._members() if m.role == role), default=0)

    def await_whole(self, deadline_s: float, role: str = "", before: int = 0) -> None:
        """Waits until every member is ready, and one of ``role`` is newer than ``before``.

        Raises:
            AfdError: that is not so in time, or the deployment has ended.
        """
        end = time.monotonic() + deadline_s
        while not ((not role or self.newest(role) > before) and self.is_whole()):
            if not psutil.pid_exists(self.server.pid):
                raise AfdError("the deployment has ended")
            if time.monotonic() > end:
                raise AfdError(f"the deployment is not whole after {deadline_s:g} s")
            time.sleep(_POLL_S)

    def operate(self, wait_s: float = 120.0) -> Operator:
        return Operator(self.server.control, self.keys, wait_s, say=lambda line: None)

    def _members(self) -> tuple[Member, ...]:
        return operator.status(self.server.control, self.keys).members


def _takes_orders(process: psutil.Process) -> bool:
    """Whether it waits, and is no fork of one that does (afd_launch/standby_process.py)."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{process.pid}/fd/0").startswith("socket:")
    return False
