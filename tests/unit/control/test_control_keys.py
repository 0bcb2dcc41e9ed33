"""Key files and addresses: what is accepted, and the error for each mistake."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
from pathlib import Path

import pytest

from afd.control.address import Endpoint, parse, to_connect, to_listen
from afd.control.keys import CurveKeys
from afd.errors import ConfigError


def test_save_and_load(tmp_path: Path) -> None:
    keys = CurveKeys.generate()
    path = tmp_path / "keys.json"
    previous = os.umask(0)
    try:
        keys.save(path)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert CurveKeys.load(path) == keys


def test_secrets_are_not_printed() -> None:
    keys = CurveKeys.generate()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    assert keys.server_public in repr(keys)


def test_save_does_not_overwrite(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    first = CurveKeys.generate()
    first.save(path)
    with pytest.raises(ConfigError, match="exists already"):
        CurveKeys.generate().save(path)
    assert CurveKeys.load(path) == first
    with pytest.raises(ConfigError, match="cannot write"):
        first.save(tmp_path / "missing" / "keys.json")


def test_a_file_that_others_can_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys.json"
    CurveKeys.generate().save(path)
    path.chmod(0o644)
    with caplog.at_level(logging.WARNING):
        CurveKeys.load(path)
    assert "chmod 600" in caplog.text


def damaged(change: str) -> str:
    good = json.loads(CurveKeys.generate().to_json())
    match change:
        case "missing":
            del good["client_secret"]
        case "short":
            good["server_public"] = good["server_public"][:-1]
        case "no key":
            good["server_secret"] = "~" * 40
        case "other pair":
            good["client_public"] = CurveKeys.generate().client_public
        case "number":
            good["client_public"] = 7
    return json.dumps(good)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not JSON"),
        ("[]", "must hold exactly"),
        (damaged("missing"), "must hold exactly"),
        (damaged("short"), "server_public is not a 40-character"),
        (damaged("no key"), "server_secret is not a 40-character"),
        (damaged("number"), "client_public is not a 40-character"),
        (damaged("other pair"), "client_public does not belong"),
        ("\xff\xfe", "not text"),
    ],
)
def test_bad_files_get_one_clear_error(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(text.encode("latin-1"))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=part) as caught:
        CurveKeys.load(path)
    assert str(path) in str(caught.value)
    assert "afd keys FILE" in str(caught.value)


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no keys file .*afd keys FILE"):
        CurveKeys.load(tmp_path / "none.json")


# --- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "endpoint"),
    [
        ("tcp://10.0.0.1:5555", Endpoint("tcp", host="10.0.0.1", port=5555)),
        ("tcp://[::1]:5555", Endpoint("tcp", host="::1", port=5555)),
        ("tcp://*:0", Endpoint("tcp", host="*", port=0)),
        ("ipc://run/afd.sock", Endpoint("ipc", path="run/afd.sock")),
    ],
)
def test_parse(address: str, endpoint: Endpoint) -> None:
    assert parse(address) == endpoint
    assert str(endpoint) == address


@pytest.mark.parametrize(
    "address",
    ["", "localhost:5555", "http://h:1", "tcp://h", "tcp://:1", "tcp://h:x", "tcp://h:70000",
     "ipc://", "tcp://h:-1", "tcp://h:²"],
)  # fmt: skip
def test_malformed_addresses(address: str) -> None:
    with pytest.raises(ConfigError, match="tcp://HOST:PORT"):
        parse(address)


@pytest.mark.parametrize(
    ("address", "bound"),
    [
        ("tcp://127.9.9.9:1", "tcp://127.9.9.9:1"),
        ("tcp://localhost:1", "tcp://127.0.0.1:1"),
        ("tcp://[::1]:1", "tcp://[::1]:1"),
        ("ipc://x", "ipc://x"),
        ("tcp://*:1", "tcp://*:1"),
        ("tcp://0.0.0.0:1", "tcp://0.0.0.0:1"),
    ],
)
def test_bound_addresses_are_numeric(address: str, bound: str) -> None:
    assert str(to_listen(address)) == bound


def test_unresolvable_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise socket.gaierror("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    with pytest.raises(ConfigError, match="'nowhere' cannot be resolved"):
        to_listen("tcp://nowhere:1")


@pytest.mark.parametrize("address", ["tcp://*:5", "tcp://0.0.0.0:5", "tcp://[::]:5", "tcp://h:0"])
def test_listening_addresses_are_not_for_members(address: str) -> None:
    with pytest.raises(ConfigError, match=r"listening|port 0"):
        to_connect(address)
