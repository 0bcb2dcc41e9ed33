"""The process that waits to replace dead attention instances (afd_launch.standby).

It has imported what vLLM's API server and engine import. A fork of it is what `afd attention` is,
and a fork of that is the server.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from afd.config.roles import ROLE_FILE_ENV, load_role
from afd.devices import CUDA, ROCM
from afd.errors import AfdError
from afd.host.logs import print_our_logs
from afd_launch.attention_role import run_attention
from afd_launch.process import Child, die_with
from afd_launch.role import end_at_once
from afd_launch.standby_process import await_order, obstacle
from attention_worker.vllm_hooks.command import attention_command
from attention_worker.vllm_hooks.standby import become_server, import_all

LATE = {
    ROLE_FILE_ENV,
    "OTEL_SERVICE_NAME",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
    *CUDA.visible_variables,
    *ROCM.visible_variables,
}
"""Variables that nothing reads while vLLM is imported: a GPU is looked for at its first use."""

logger = logging.getLogger("afd.attention")


class _Serve(Exception):
    """Unwinds the fork that is to be the server. arguments: of the server."""

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__()
        self.arguments = arguments


def late_changes(
    started: Mapping[str, str], wanted: Mapping[str, str]
) -> dict[str, str | None] | None:
    """Returns what a process started with one environment must change to have another one.

    A variable that must go has the value None. The result is None if the change comes too late.
    """
    changes = {
        name: wanted.get(name)
        for name in started.keys() | wanted.keys()
        if started.get(name) != wanted.get(name)
    }
    return changes if changes.keys() <= LATE else None


def fork_server(
    started: Mapping[str, str], argv: Sequence[str], environment: Mapping[str, str]
) -> Child | None:
    """Makes a fork the server. Returns None if it cannot be one; raises ``_Serve`` in the fork.

    started: the variables with which this process imported vLLM. argv, environment: as from
    ``attention_command``.
    """
    changes = late_changes(started, environment)
    why = "imported vLLM with other variables" if changes is None else obstacle()
    if changes is None or why is not None:
        logger.info("vLLM is imported again, because the process that waited %s", why)
        return None
    parent = os.getpid()
    if pid := os.fork():
        return Child(pid)
    die_with(parent, signal.SIGKILL)
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    raise _Serve(argv[3:])


def main(file: str) -> int:
    """Waits for orders; each fork runs an attention instance.

    file: the role file of an instance like them.
    """
    try:
        role = load_role(file)
        # vLLM, torch and their libraries read these when they are imported.
        os.environ |= attention_command(role)[1]
        os.environ[ROLE_FILE_ENV] = str(Path(file).absolute())
        started = dict(os.environ)
        import_all(role)
        order = await_order()
        if order is None:
            return 0
        print_our_logs()  # not those of other modules: the server is to be a fork of this process
        end_at_once(
            run_attention(
                load_role(order.file),
                Path(order.file),
                order.environment,
                lambda argv, environment: fork_server(started, argv, environment),
            )
        )
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr)
        return 2
    except _Serve as server:
        arguments = server.arguments
    become_server(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
