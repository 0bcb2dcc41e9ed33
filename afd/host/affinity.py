"""Binds a process to its cores."""

from __future__ import annotations

import os
from collections.abc import Sequence

from afd.errors import ConfigError


def bind_process(cpus: Sequence[int], setting: str) -> None:
    """Bind all present and future threads of this process to ``cpus``.

    sched_setaffinity(2) binds one thread, and a new thread inherits the mask of its creator.
    Libraries start threads before a role knows its cores, so every existing thread is bound too.

    Args:
        cpus: core numbers; () changes nothing.
        setting: the key that names the cores, for the error message.

    Raises:
        ConfigError: this process may not use one of the cores.
    """
    if not cpus:
        return
    usable = os.sched_getaffinity(0)
    wanted, bound = set(cpus), set[int]()
    while threads := {int(name) for name in os.listdir("/proc/self/task")} - bound:
        for thread in threads:  # an unbound thread may start another one, so look again
            try:
                os.sched_setaffinity(thread, wanted)
            except ProcessLookupError:
                pass  # the thread has ended
            except OSError:
                raise _refusal(wanted, usable, setting) from None
        bound |= threads
    got = os.sched_getaffinity(0)
    if got != wanted:  # the kernel ignores cores that do not exist
        raise _refusal(wanted - got, usable, setting)


def _refusal(cores: set[int], usable: set[int], setting: str) -> ConfigError:
    def words(numbers: set[int]) -> str:
        return ", ".join(map(str, sorted(numbers)))

    return ConfigError(
        f"cannot run on cores {words(cores)}, because this process may use only {words(usable)};"
        f" change {setting}"
    )
