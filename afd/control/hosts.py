"""Looks up processes of this host, so that the server notices a kill -9 before the timeout."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil


def host_name() -> str:
    return socket.gethostname()


def pid_space() -> str:
    """Identifies the pid namespace: pids are comparable only between processes with equal values.

    It is the boot id and the pid namespace on Linux (two containers may share a host name but not
    their pids), "" elsewhere; then only heartbeats count.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return ""
    return f"{boot}/{namespace}"


def process_alive(pid: int) -> bool:
    """False once the process is gone or a zombie (killed, but not yet reaped by its parent)."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.ZombieProcess:
        return False
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True
