"""Where `afd ctl` finds the keys of the deployments that this user runs on this host.

`afd serve` leaves a link per control address, which points to the operators' keys in the
deployment's private folder. The links lie in a folder that only this user may enter. A link whose
folder is gone (its supervisor was killed) is worthless and is removed by the next `afd serve`.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from afd.control.address import parse
from afd.control.keys import ClientKeys, load_client
from afd.errors import ConfigError

_SYSTEM_TEMPORARY = Path("/tmp")


def operator_keys(address: str, file: Path | None = None) -> ClientKeys:
    """The operators' keys of the deployment whose control plane is at ``address``.

    Args:
        file: a key file, as given with --keys; None: look for a deployment of this user.

    Raises:
        ConfigError: the file is no key file, or there is no such deployment.
    """
    if file is not None:
        return load_client(file)
    for folder in _folders():
        link = folder / _name(address)
        if _is_private(folder) and link.exists():
            return load_client(link)
    raise ConfigError(
        f"there are no keys for the control plane at {address}: no deployment of this user on this"
        " host listens there; pass --keys FILE, the file that the deployment has as control.keys"
    )


@contextlib.contextmanager
def announced(address: str, file: Path) -> Iterator[bool]:
    """Lets :func:`operator_keys` find ``file`` by the address, for as long as the context lasts.

    Gives False where no private folder can be had; operators then have to name the file.
    """
    link = _link(address, file)
    try:
        yield link is not None
    finally:
        if link is not None:
            with contextlib.suppress(OSError):
                if link.readlink() == file:  # a later deployment may have taken the address
                    link.unlink()


def _link(address: str, file: Path) -> Path | None:
    for folder in _folders():
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            if not _is_private(folder):
                continue
            for old in folder.iterdir():
                if not old.exists():
                    old.unlink(missing_ok=True)
            link = folder / _name(address)
            fresh = folder / f".{os.getpid()}"
            fresh.symlink_to(file)
            fresh.replace(link)
            return link
        except OSError:
            continue
    return None


def _folders() -> list[Path]:
    """Candidates, in order. Not only the environment's: `afd ctl` may run in another one."""
    user = os.geteuid()
    bases = [Path(f"/run/user/{user}"), _SYSTEM_TEMPORARY, Path(tempfile.gettempdir())]
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        bases.insert(0, Path(base))
    return [base / f"afd-control-{user}" for base in dict.fromkeys(bases)]


def _is_private(folder: Path) -> bool:
    """A folder (and no link) of this user that nobody else may enter."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
    return ours and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _name(address: str) -> str:
    endpoint = str(parse(address))
    return quote(endpoint.replace("//localhost:", "//127.0.0.1:"), safe="")
