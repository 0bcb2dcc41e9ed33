"""What processes leave behind on this machine, told from what others use at the same time."""

import contextlib
from pathlib import Path

import psutil


def shared_memory() -> frozenset[str]:
    """Names in /dev/shm that no live process maps: what a dead one left there.

    Told by inode, because a semaphore is mapped under another name than the one it gets. Of a
    process that ends just now it may name what is gone in the next call.
    """
    files = {}
    with contextlib.suppress(FileNotFoundError):
        for path in Path("/dev/shm").iterdir():
            with contextlib.suppress(OSError):
                files[str(path.stat().st_ino)] = path.name
    for pid in psutil.pids() if files else ():
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines():
                if "/dev/shm/" in line:
                    files.pop(line.split()[4], None)
    return frozenset(files.values())
