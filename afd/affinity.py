"""Binding a process to its cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from afd.errors import ConfigError


def bind_process(cpus: Sequence[int], setting: str) -> None:
    """Bind every thread of this process, and those that will be started, to ``cpus``.

    sched_setaffinity(2) binds one thread, and a thread begins with the mask of the one that starts
    it; libraries have started theirs long before a role knows its cores.

    Args:
        cpus: core numbers; () leaves everything as it is.
        setting: where the cores were named, for the message.

    Raises:
        ConfigError: there is a core among them that this process may not use.
    """
    if not cpus:
        return
    usable = os.sched_getaffinity(0)
    wanted, bound = set(cpus), set[int]()
    while threads := {int(name) for name in os.listdir("/proc/self/task")} - bound:
        for thread in threads:  # an unbound one may start another meanwhile: so look again
            try:
                os.sched_setaffinity(thread, wanted)
            except ProcessLookupError:
                pass  # it has ended
            except OSError:
                raise _refusal(wanted, usable, setting) from None
        bound |= threads
    got = os.sched_getaffinity(0)
    if got != wanted:  # the kernel takes those that exist
        raise _refusal(wanted - got, usable, setting)


def _refusal(cores: set[int], usable: set[int], setting: str) -> ConfigError:
    def words(numbers: set[int]) -> str:
        return ", ".join(map(str, sorted(numbers)))

    return ConfigError(
        f"cannot run on cores {words(cores)}; this process may use {words(usable)}:"
        f" change {setting}"
    )
