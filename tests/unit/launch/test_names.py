"""Names are resolved once, and a name server that does not answer is one clear error."""

import socket
import time

import pytest

from afd.config.deployment import Deployment
from afd.errors import ConfigError
from afd_launch.names import numeric, resolved
from afd_launch.roles_of_host import held_addresses


def test_a_silent_name_server_is_given_up(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(30) or [])
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"control\.address: the name far was not resolved"):
        resolved("far", "control.address", 0.2)
    assert time.monotonic() - began < 2


def test_afd_serve_gives_up_before_anything_starts(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(30) or [])
    monkeypatch.setattr("afd_launch.names.resolved.__defaults__", (0.2,))
    plan = Deployment.from_plain({"model": "m", "control": {"address": "tcp://far:5555"}})
    with (
        pytest.raises(ConfigError, match=r"the name far was not resolved within 0\.2 s"),
        held_addresses(plan),
    ):
        pass


def test_addresses_are_not_resolved(monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: pytest.fail("it was resolved"))
    assert resolved("::1", "x") == "::1" and resolved("127.0.0.1", "x") == "127.0.0.1"
    assert numeric("tcp://[::1]:5", "x") == "tcp://[::1]:5"


def test_names_become_addresses():
    assert numeric("tcp://localhost:5", "x") == "tcp://127.0.0.1:5"
    with pytest.raises(ConfigError, match=r"gateway\.host: the name no\.invalid cannot be"):
        resolved("no.invalid", "gateway.host")
