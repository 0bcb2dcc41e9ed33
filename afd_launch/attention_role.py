"""`afd attention`: runs vLLM as a child process, and lets it finish its requests on SIGTERM.

vLLM ends its engine at once on SIGTERM, whatever runs on it. So this process takes the signal: it
asks the control plane to send no new requests, waits until vLLM has none, and then ends it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from afd.config.roles import ROLE_FILE_ENV, RoleSpec
from afd.control import operator
from afd.control.keys import load_client
from afd.errors import AfdError
from afd.host.logs import say_phase
from afd.host.ports import held_ports
from afd_launch.private_folder import private_folder
from afd_launch.process import Started, die_with
from afd_launch.readiness import DIRECT, local_address
from attention_worker.running_requests import ENGINE_DIED, PATH

SETTLE_S = 1.0
"""Seconds after which every gateway has read that no new requests are wanted."""
POLL_S = 0.25
END_S = 15.0
"""Seconds from vLLM's SIGTERM to its SIGKILL."""
_ASK_S = 2.0

logger = logging.getLogger("afd.attention")


Fork = Callable[[Sequence[str], Mapping[str, str]], Started | None]
"""Makes a fork of this process the server with these arguments and variables; None: it cannot."""


def run_attention(
    spec: RoleSpec,
    file: Path | None,
    environment: Mapping[str, str] = os.environ,
    fork: Fork = lambda argv, environment: None,
) -> int:
    """Runs one attention instance until it ends.

    Args:
        file: the role file, if a supervisor wrote one; it also removes it. environment: for vLLM.
            fork: for a process that has imported vLLM; it needs ``file``.

    Returns:
        the exit status of vLLM; 0 after it was told to end. vLLM ends its engine first; its API
        server may take that for a death, or fail in its last report, and end with another status.
    """
    from attention_worker.vllm_hooks.command import attention_command
    from attention_worker.vllm_hooks.versions import installed, warning

    vllm = installed()
    if vllm is not None and (untested := warning(vllm)) is not None:
        logger.warning("%s", untested)
    if file is not None:
        argv, environment = attention_command(spec, environment)
        environment = {**environment, ROLE_FILE_ENV: str(file.absolute())}
        server = AttentionServer(spec, argv, environment, own_session=False)
        return server.run(child=fork(argv, environment))
    host = spec.deployment.attention.host
    with private_folder() as (folder, watchdog), held_ports([host] * 2) as (free, transfer):
        spec = replace(spec, api_port=spec.api_port or free, transfer_port=transfer)
        argv, environment = attention_command(spec, environment)
        spec.save(folder / "role.json")
        environment = {**environment, ROLE_FILE_ENV: str(folder / "role.json")}
        server = AttentionServer(spec, argv, environment, own_session=True)
        return server.run(on_start=watchdog.add)


class AttentionServer:
    """The vLLM process of one attention instance.

    Args:
        own_session: it gets a login session of its own, so that a terminal's Ctrl-C reaches it
            only through this process. Under a supervisor, this process has one already.
    """

    def __init__(
        self,
        spec: RoleSpec,
        argv: Sequence[str],
        environment: Mapping[str, str],
        *,
        own_session: bool,
    ) -> None:
        self._spec = spec
        self._argv = list(argv)
        self._environment = dict(environment)
        self._own_session = own_session
        # A list and no Event: an Event's set() waits for a lock that its wait(), which the signal
        # interrupts, may hold.
        self._signals: list[int] = []
        self._drained = False
        self._terminated = False

    def run(
        self,
        on_start: Callable[[int], None] = lambda group: None,
        child: Started | None = None,
    ) -> int:
        """Call it on the main thread (signals).

        on_start: gets the process group of vLLM. child: vLLM, if it runs already.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        if child is None:
            say_phase(logger, "importing vLLM")
            child = self._start()
        on_start(child.pid)
        while (status := child.poll()) is None:
            if self._signals:
                self._end(child)
            else:
                time.sleep(POLL_S)
        if self._terminated or (self._signals and status in (0, ENGINE_DIED)):
            if status not in (0, ENGINE_DIED, -signal.SIGTERM, -signal.SIGKILL):
                logger.warning("vLLM ended with status %d after SIGTERM", status)
            return 0
        if status < 0:  # end in the same way, for the supervisor's message
            with contextlib.suppress(OSError):  # SIGKILL has no handler
                signal.signal(-status, signal.SIG_DFL)
            os.kill(os.getpid(), -status)
        return status

    def _start(self) -> subprocess.Popen[bytes]:
        parent = os.getpid()
        return subprocess.Popen(
            self._argv,
            env=self._environment,
            start_new_session=self._own_session,
            preexec_fn=lambda: die_with(parent, signal.SIGKILL),
        )

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _end(self, child: Started) -> None:
        """Drains vLLM and ends it. Returns when it has ended."""
        if not self._drained:
            self._drained = True
            self._drain(child)
        self._terminated = child.poll() is None
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            logger.warning("vLLM has not ended %g s after SIGTERM; killing it", END_S)
            child.kill()
            child.wait()

    def _drain(self, child: Started) -> None:
        """Waits until vLLM has no request, for at most ``deadlines.drain_s``."""
        limit_s = self._spec.deployment.deadlines.drain_s
        if self._load() is None:
            return  # it does not serve yet, or not any more
        self._ask_for_no_requests()
        end = time.monotonic() + max(limit_s, SETTLE_S)
        idle_since = time.monotonic()
        logger.info("%s leaves once its requests have finished", self._spec.id)
        while child.poll() is None and time.monotonic() < end:
            # Only Ctrl-C is repeated to hurry; an orchestrator may repeat SIGTERM.
            if signal.SIGINT in self._signals[1:]:
                return
            time.sleep(POLL_S)
            load = self._load()
            if load is None:
                return
            if load:
                idle_since = time.monotonic()
            elif time.monotonic() - idle_since >= SETTLE_S:
                return
        logger.warning(
            "%s still has requests after %g s (deadlines.drain_s); ending it",
            self._spec.id,
            limit_s,
        )

    def _ask_for_no_requests(self) -> None:
        if self._spec.keys_file is None:
            return
        try:
            keys = load_client(self._spec.keys_file, self._spec.id)
            address = self._spec.control_address
            operator.retire(address, keys, member=self._spec.id, deadline_s=_ASK_S)
        except AfdError as error:
            logger.warning("new requests cannot be kept away: %s", error)

    def _load(self) -> int | None:
        """Returns the number of requests in vLLM's API server; None if it does not answer."""
        host = local_address(self._spec.deployment.attention.host)
        url = f"http://{f'[{host}]' if ':' in host else host}:{self._spec.api_port}{PATH}"
        try:
            with DIRECT.open(url, timeout=5) as answer:
                return int(answer.read())
        except (OSError, ValueError):
            return None
