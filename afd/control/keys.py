"""CURVE keys of a deployment.

A deployment has one key file (:class:`CurveKeys`). It holds the pair of the server and the pair of
operators; the pair of each member is derived from the server's secret. So whoever has the file can
act as the server, as an operator and as every member. A role needs only its own pair
(:class:`ClientKeys`), with which it can act as that member and as nobody else.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import stat
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import zmq
from zmq.utils import z85

from afd.errors import ConfigError

_MAKE = "make it with `afd keys FILE`"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ClientKeys:
    """What one client needs: the server's public key and a pair of its own, all in Z85."""

    server_public: str
    client_public: str
    client_secret: str = field(repr=False)

    @property
    def fingerprint(self) -> str:
        """Eight hex digits by which people compare the key files of two hosts."""
        return hashlib.sha256(self.server_public.encode("ascii")).hexdigest()[:8]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a new file with mode 0600; ConfigError if it exists or cannot be written."""
        _write_new(path, json.dumps(asdict(self), indent=1))


@dataclass(frozen=True)
class CurveKeys:
    """The keys of a deployment: two Curve25519 pairs in Z85 (40 ASCII characters each).

    The "client" pair is the one of operators.
    """

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def generate(cls) -> CurveKeys:
        """Returns new random keys."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(*(part.decode("ascii") for part in (*server, *client)))

    @property
    def operator(self) -> ClientKeys:
        """The pair of operators (`afd ctl`, the supervisor)."""
        return ClientKeys(self.server_public, self.client_public, self.client_secret)

    def member(self, member: str) -> ClientKeys:
        """The pair of one member, such as "ffn-0.1"."""
        secret = z85.encode(self._derived(f"member {member}"))  # Curve25519 takes any 32 bytes
        public = zmq.curve_public(secret)
        return ClientKeys(self.server_public, public.decode("ascii"), secret.decode("ascii"))

    @property
    def seal(self) -> bytes:
        """The key with which the control plane authenticates its own snapshots (32 bytes)."""
        return self._derived("seal")

    def _derived(self, purpose: str) -> bytes:
        key = self.server_secret.encode("ascii")
        return hmac.digest(key, f"afd control {purpose}".encode(), hashlib.sha256)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a new file with mode 0600; ConfigError if it exists or cannot be written."""
        _write_new(path, self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CurveKeys:
        """Reads a file written by :meth:`save`; ConfigError if it is not such a file."""
        return cls.from_json(_read(path), source=os.fspath(path))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str, *, source: str) -> CurveKeys:
        """Parses and checks the keys. source: their origin, for the ConfigError."""
        keys = cls(**_checked(text, source, [f.name for f in fields(cls)]))
        _check_pair(source, "server", keys.server_public, keys.server_secret)
        _check_pair(source, "client", keys.client_public, keys.client_secret)
        return keys


def load_client(path: str | os.PathLike[str], member: str | None = None) -> ClientKeys:
    """Reads a client's keys from a deployment's key file or from a file with only its own pair.

    Args:
        member: whose pair to derive from a deployment's file; None: the operators'.

    Raises:
        ConfigError: the file cannot be read or is no key file.
    """
    text, source = _read(path), os.fspath(path)
    if '"server_secret"' in text:
        deployment = CurveKeys.from_json(text, source=source)
        return deployment.operator if member is None else deployment.member(member)
    try:
        keys = ClientKeys(**_checked(text, source, [f.name for f in fields(ClientKeys)]))
    except ConfigError:
        # A damaged file is more often a deployment's than a member's: name the fields of that.
        CurveKeys.from_json(text, source=source)
        raise
    _check_pair(source, "client", keys.client_public, keys.client_secret)
    return keys


def _write_new(path: str | os.PathLike[str], text: str) -> None:
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
        os.fchmod(descriptor, 0o600)  # the umask may have removed permissions
        file.write(text + "\n")


def _read(path: str | os.PathLike[str]) -> str:
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
    return text


def _checked(text: str, source: str, names: list[str]) -> dict[str, str]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"{source} is not a keys file (not JSON); {_MAKE}") from None
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ConfigError(f"{source} must hold exactly {', '.join(names)}; {_MAKE}")
    for name in names:
        if not isinstance(values[name], str) or not _is_z85_key(values[name]):
            raise ConfigError(f"{source}: {name} is not a 40-character Z85 key; {_MAKE}")
    return values


def _check_pair(source: str, side: str, public: str, secret: str) -> None:
    if zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
        raise ConfigError(
            f"{source}: {side}_public does not belong to {side}_secret "
            f"(was the file edited?); {_MAKE}"
        )


def _is_z85_key(text: str) -> bool:
    if len(text) != 40 or not text.isascii():
        return False
    try:
        zmq.curve_public(text.encode("ascii"))
    except zmq.ZMQError:
        return False
    return True
