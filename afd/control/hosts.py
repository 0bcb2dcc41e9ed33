"""Which processes of this host live: lets the server notice a kill -9 before any timeout."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil


def host_name() -> str:
    return socket.gethostname()


def pid_space() -> str:
    """Names the set of processes in which a pid of ours means the same process.

    The boot id and the pid namespace on Linux: two containers may share a host name but not their
    pids. Empty where this cannot be told; pids are then never looked up, and only heartbeats count.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{boot}/{namespace}"


def process_alive(pid: int) -> bool:
    """False once the process is gone or is a zombie (killed, but not yet reaped by its parent)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.ZombieProcess:
        return False
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
