"""What a process that waits does: it forks itself for each role that it is told to run.

It is the supervisor's child. Its standard input is a socket (``SOCK_SEQPACKET``) to the
supervisor, on which it says ``READY``. An order is one message with a role file, variables and two
descriptors: the role's output, and a socket. On this the fork says its pid, and it goes on once it
has an answer.

It forks twice, so that the supervisor adopts the fork (:func:`afd_launch.process.adopt_orphans`):
the role then outlives the process that waits, and the supervisor gets its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from afd_launch.process import die_with
from attention_worker.forks import unknown_threads

READY = b"waiting to take over"
GO = b"go"
LONGEST = 1 << 20
"""Bytes of an order."""
_DEVICE_FILES = ("/dev/nvidia-uvm", "/dev/kfd")
"""What CUDA and HIP open when they look for GPUs; by NVML they do not. A fork has the GPUs that
were visible then, and its instance may be meant for others."""


@dataclass(frozen=True)
class Order:
    """file: of the role. environment: the variables that it would be started with; those of the
    process that waits may be others."""

    file: str
    environment: dict[str, str]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def await_order() -> Order | None:
    """Waits for orders, and returns each one in the process that is to run the role.

    That is a fork with the output, session and parent of a role that was started. If this process
    cannot be forked, it is this process itself.

    Returns:
        None in the process that waits: nobody will order anything any more.
    """
    supervisor = os.getppid()
    channel = socket.socket(fileno=os.dup(0))
    channel.send(READY)
    while True:
        text, descriptors, _, _ = socket.recv_fds(channel, LONGEST, 2)
        if not text:
            return None
        output, answer = descriptors
        if (why := obstacle()) is not None or _fork_twice(supervisor):
            break
        os.close(output)
        os.close(answer)
    channel.close()
    nothing = os.open(os.devnull, os.O_RDONLY)
    with socket.socket(fileno=answer) as told:
        told.send(str(os.getpid()).encode())
        if told.recv(len(GO)) != GO:  # the supervisor has given up
            os._exit(1)
    for descriptor, number in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(descriptor, number)
    os.close(nothing)
    os.close(output)
    if why is not None:
        print(f"this role is no fork of the process that waited, which {why}", file=sys.stderr)
    # Python's generator has a new seed after a fork, and torch's seed is a constant at first.
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    return Order(**json.loads(text))


def obstacle() -> str | None:
    """Returns why this process must not be forked; None: it may."""
    if threads := unknown_threads():
        return f"has other threads: {', '.join(threads)}"
    file = device_file()
    return None if file is None else f"uses {file}"


def device_file() -> str | None:
    """Returns the file by which this process has looked for GPUs; None: it has not. What is visible
    to it is decided then."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the descriptor of the folder itself
            continue
        if target in _DEVICE_FILES:
            return target
    return None


def _fork_twice(supervisor: int) -> bool:
    """Returns True in the fork, which is the supervisor's child, and False in this process."""
    try:
        child = os.fork()
    except OSError:  # no memory: the supervisor sees that nobody answers
        return False
    if child:
        os.waitpid(child, 0)
        return False
    between = os.getpid()
    try:
        child = os.fork()
    except OSError:
        os._exit(1)
    if child:
        os._exit(0)
    os.setsid()
    while os.getppid() == between:
        time.sleep(0.001)
    die_with(supervisor, signal.SIGTERM)
    return True
