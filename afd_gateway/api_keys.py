"""API keys of clients: a file of hashes, and who may run how many requests.

One line per key: NAME SHA256 [running=N]. SHA256 is the hash of the key in hexadecimal; ``afd
api-key`` writes it. running: requests of this key at a time; without it there is no limit. Keys are
long and random, so a plain hash cannot be reversed. Lines that begin with # are comments.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from aiohttp import hdrs

from afd.errors import ConfigError
from afd_gateway.counts import Counts
from afd_gateway.errors import GatewayError

log = logging.getLogger("afd.gateway")

_LOOK_S = 1.0  # how often the file's date is looked at
_LINE = re.compile(
    r"(?P<name>[\w.@-]{1,64}) (?P<digest>[0-9a-f]{64})(?: running=(?P<running>[1-9]\d{0,8}))?"
)
_CHALLENGE: Mapping[str, str] = {"WWW-Authenticate": "Bearer"}


@dataclass(frozen=True)
class ApiKey:
    """running: requests at a time; None: no limit."""

    name: str
    running: int | None


def digest_of(key: str) -> str:
    """Returns the SHA-256 of a key, in hexadecimal."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def parse_api_keys(text: str, source: str) -> dict[str, ApiKey]:
    """Returns the keys by digest. Raises ConfigError that names the line of ``source``."""
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = _LINE.fullmatch(" ".join(line.split()))
        if found is None:
            raise ConfigError(
                f"{source}, line {number} is not NAME SHA256 [running=N]; write it with"
                " `afd api-key NAME FILE`"
            )
        running = found["running"]
        if found["digest"] in keys or any(key.name == found["name"] for key in keys.values()):
            raise ConfigError(f"{source}, line {number} repeats a name or a key; remove one")
        keys[found["digest"]] = ApiKey(found["name"], None if running is None else int(running))
    if not keys:
        raise ConfigError(f"{source} has no key; add one with `afd api-key NAME {source}`")
    return keys


def read_api_keys(path: Path) -> dict[str, ApiKey]:
    """Returns the keys of a file by digest. Raises ConfigError."""
    try:
        return parse_api_keys(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ConfigError(
            f"gateway.api_keys: cannot read {path}: {error.strerror}; make it with `afd api-key"
            f" NAME {path}`"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"gateway.api_keys: {path} is not a text file") from None


def add_api_key(path: Path, name: str, running: int | None = None) -> str:
    """Appends a new key to the file, which is created with mode 0600. Returns the key.

    Raises ConfigError if the name is taken or not valid, or the file cannot be written.
    """
    key = f"afd-{secrets.token_urlsafe(32)}"
    limit = "" if running is None else f" running={running}"
    line = f"{name} {digest_of(key)}{limit}"
    try:
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        parse_api_keys(f"{before}\n{line}", str(path))
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a") as file:
            file.write(f"{line}\n" if before.endswith("\n") or not before else f"\n{line}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return key


def _key_of(headers: Mapping[str, str]) -> str | None:
    """Returns the key that a client sent: as OpenAI's clients do, or as Anthropic's."""
    scheme, _, key = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("X-Api-Key") or headers.get("Api-Key")


class ApiKeys:
    """Admits requests by their key. Call it on the event loop.

    The file is read again when its date changes. If it is broken then, the keys before it stay.

    Args:
        refused: called with the reason: "unauthorized" or "key_limit".
        counts: shared by the processes of the port.
        clock: seconds.
    """

    def __init__(
        self,
        path: Path,
        retry_after_s: int,
        refused: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        counts: Counts | None = None,
    ) -> None:
        self._path = path
        self._retry_after_s = retry_after_s
        self._refused = refused
        self._clock = clock
        self._counts = counts or Counts()
        self._date = self._date_of_file()
        self._keys = read_api_keys(path)
        self._looked = clock()

    @contextlib.contextmanager
    def admit(self, headers: Mapping[str, str]) -> Iterator[ApiKey]:
        """Counts a request of this client while the block runs.

        Raises GatewayError: 401 without a known key, 429 if the key runs as many as it may.
        """
        self._refresh()
        sent = _key_of(headers)
        key = None if sent is None else self._keys.get(digest_of(sent))
        if key is None:
            self._refused("unauthorized")
            what = "no API key was sent" if sent is None else "the API key is not valid"
            raise GatewayError(
                401, f"{what}; send a valid one as Authorization: Bearer KEY", _CHALLENGE
            )
        name = f"key {key.name}"
        if key.running is not None and self._counts.total(name) >= key.running:
            self._refused("key_limit")
            raise GatewayError(
                429,
                f"this API key may run {key.running} requests at a time; try again later",
                {"Retry-After": str(self._retry_after_s)},
            )
        self._counts.add(name, 1)
        try:
            yield key
        finally:
            self._counts.add(name, -1)

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        date = self._date_of_file()
        if date == self._date:
            return
        self._date = date
        try:
            self._keys = read_api_keys(self._path)
        except ConfigError as error:
            log.warning("the API keys stay as they were: %s", error)
        else:
            log.info("%d API keys read from %s", len(self._keys), self._path)

    def _date_of_file(self) -> tuple[int, int, int] | None:
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino
