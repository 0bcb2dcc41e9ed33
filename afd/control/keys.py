"""CURVE keys of one deployment: one file (or environment variable) that every role reads.

The server's pair encrypts the control plane; the client pair is shared by all members and is what
the server lets in. Whoever holds the file may join, so it is written for its owner only.
"""

from __future__ import annotations

import json
import logging
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import zmq

from afd.errors import ConfigError

ENV_KEYS = "AFD_CONTROL_KEYS"
"""Environment variable with the keys themselves, as the JSON text of the file."""
ENV_KEYS_FILE = "AFD_CONTROL_KEYS_FILE"
"""Environment variable with the path of the file."""

_MAKE = "make it with `afd keys FILE`"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CurveKeys:
    """Two Curve25519 pairs in Z85 (40 ASCII characters each)."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """New random keys."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(*(part.decode("ascii") for part in (*server, *client)))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a new file with mode 0600; ConfigError if it exists or cannot be written."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise ConfigError(
                f"{os.fspath(path)} exists already; running members may use its keys: "
                "remove it first, or name another file"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot write the keys to {os.fspath(path)}: {error.strerror}; "
                "name a file in a directory that you may write to"
            ) from error
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask says
            file.write(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CurveKeys:
        """Reads a file written by :meth:`save`; ConfigError naming what is wrong with it."""
        name = os.fspath(path)
        try:
            text = Path(path).read_text(encoding="ascii")
            mode = Path(path).stat().st_mode
        except FileNotFoundError:
            raise ConfigError(f"there is no keys file {name}; {_MAKE}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{name} is not a keys file (not text); {_MAKE}") from None
        except OSError as error:
            raise ConfigError(
                f"cannot read the keys file {name}: {error.strerror}; "
                "run as its owner, or copy the file for this user"
            ) from error
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            # Not an error: secrets mounted by an orchestrator are often group-readable.
            _log.warning("%s can be read by other users; `chmod 600` it", name)
        return cls.from_json(text, source=name)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> CurveKeys:
        """Parses and checks the keys; ``source`` names their origin in the ConfigError."""
        try:
            values = json.loads(text)
        except ValueError:
            raise ConfigError(f"{source} is not a keys file (not JSON); {_MAKE}") from None
        names = [f.name for f in fields(cls)]
        if not isinstance(values, dict) or sorted(values) != sorted(names):
            raise ConfigError(f"{source} must hold exactly {', '.join(names)}; {_MAKE}")
        for name in names:
            if not isinstance(values[name], str) or not _is_z85_key(values[name]):
                raise ConfigError(f"{source}: {name} is not a 40-character Z85 key; {_MAKE}")
        keys = cls(**values)
        pairs = {
            "server": (keys.server_public, keys.server_secret),
            "client": (keys.client_public, keys.client_secret),
        }
        for side, (public, secret) in pairs.items():
            if zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
                raise ConfigError(
                    f"{source}: {side}_public does not belong to {side}_secret "
                    f"(was the file edited?); {_MAKE}"
                )
        return keys

    def to_env(self) -> dict[str, str]:
        """The variable with which a launcher hands the keys to the roles that it starts."""
        return {ENV_KEYS: self.to_json()}

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> CurveKeys | None:
        """The keys of AFD_CONTROL_KEYS, else of AFD_CONTROL_KEYS_FILE, else None."""
        if text := environ.get(ENV_KEYS):
            return cls.from_json(text, source=ENV_KEYS)
        if path := environ.get(ENV_KEYS_FILE):
            return cls.load(path)
        return None


def _is_z85_key(text: str) -> bool:
    if len(text) != 40 or not text.isascii():
        return False
    try:
        zmq.curve_public(text.encode("ascii"))
    except zmq.ZMQError:
        return False
    return True
