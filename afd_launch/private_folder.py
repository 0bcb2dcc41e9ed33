"""The private folder of a supervisor or a role: role files, keys and sockets."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from afd.errors import AfdError, ConfigError
from afd_launch.watchdog import Watchdog


@contextmanager
def private_folder(*, detached: bool = False) -> Iterator[tuple[Path, Watchdog]]:
    """A new folder (0700), and a watchdog that removes it if this process is killed.

    The folder is removed at the end. After an exception that is no AfdError or signal, the watchdog
    also ends the process groups that it knows.

    Args:
        detached: see :class:`afd_launch.watchdog.Watchdog`.

    Raises:
        ConfigError: no folder can be made.
    """
    base = os.environ.get("XDG_RUNTIME_DIR")
    usable = base and os.access(base, os.W_OK)
    try:
        path = Path(tempfile.mkdtemp(prefix="afd-", dir=base if usable else None))
    except OSError as err:
        raise ConfigError(
            f"cannot make a private folder in {tempfile.gettempdir()}: {err.strerror}; free space"
            " there, or set TMPDIR to another folder"
        ) from None
    watchdog = Watchdog(path, detached=detached)
    clean = False
    try:
        yield path, watchdog
        clean = True
    except (AfdError, KeyboardInterrupt):
        clean = True
        raise
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise ConfigError(
            f"cannot write {err.filename or 'a file'}: {err.strerror}; free space there, or set"
            " TMPDIR to another folder"
        ) from None
    finally:
        shutil.rmtree(path, ignore_errors=True)
        watchdog.close(clean=clean)
