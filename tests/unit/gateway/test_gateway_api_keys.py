"""API keys of clients, and TLS."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import ssl
import stat
import subprocess
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from gateway_fakes import QUICK, FakeInstance, rig, run

from afd.errors import ConfigError
from afd_gateway.api_keys import ApiKeys, add_api_key, digest_of, parse_api_keys, read_api_keys
from afd_gateway.errors import GatewayError
from afd_gateway.tls import server_context

HASH = digest_of("secret")


def test_the_file_holds_hashes_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    first = add_api_key(path, "alice")
    second = add_api_key(path, "bob", running=2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert first not in path.read_text() and second not in path.read_text()
    keys = read_api_keys(path)
    assert keys[digest_of(first)].name == "alice" and keys[digest_of(first)].running is None
    assert keys[digest_of(second)].running == 2
    with pytest.raises(ConfigError, match="repeats a name"):
        add_api_key(path, "alice")
    with pytest.raises(ConfigError, match="line 4 is not NAME SHA256"):
        add_api_key(path, "two words")
    assert read_api_keys(path) == keys


def test_a_last_line_without_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# ours\nalice {HASH}")
    key = add_api_key(path, "bob")
    assert set(read_api_keys(path)) == {HASH, digest_of(key)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no key; add one with `afd api-key"),
        ("alice secret", "line 1 is not NAME SHA256"),
        (f"\nalice {HASH} running=x", "line 2 is not NAME SHA256"),
        (f"a {HASH}\nb {HASH}", "line 2 repeats a name or a key"),
    ],
)
def test_a_broken_file_names_its_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_api_keys(text, "keys")


def test_a_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gateway.api_keys: cannot read .*afd api-key NAME"):
        read_api_keys(tmp_path / "none")


def test_a_changed_file_is_read_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, now, refused = tmp_path / "keys", [0.0], list[str]()
    old = add_api_key(path, "old")
    keys = ApiKeys(path, 5, refused.append, clock=lambda: now[0])

    def admitted(key: str) -> bool:
        try:
            with keys.admit({"Authorization": f"Bearer {key}"}):
                return True
        except GatewayError as error:
            assert error.status == 401
            return False

    new = add_api_key(path, "new")
    assert admitted(old) and not admitted(new)
    now[0] = 2.0
    assert admitted(new)
    path.write_text("broken")
    os.utime(path, ns=(1, 1))
    now[0] = 4.0
    with caplog.at_level(logging.WARNING):
        assert admitted(old) and admitted(new)
    assert "the API keys stay as they were" in caplog.text
    path.write_text(f"other {HASH}\n")
    now[0] = 6.0
    assert not admitted(old) and admitted("secret")
    assert refused == ["unauthorized", "unauthorized"]


def test_requests_need_a_key(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    key = add_api_key(path, "alice", running=1)
    settings = replace(QUICK, api_keys=path)

    async def check() -> None:
        instance = FakeInstance()
        async with rig(instance, settings=settings) as made:
            for headers, words in (
                ({}, "no API key was sent"),
                ({"Authorization": "Bearer wrong"}, "the API key is not valid"),
                ({"Authorization": f"Basic {key}"}, "no API key was sent"),
            ):
                async with made.client.get(f"{made.url}/v1/models", headers=headers) as answer:
                    assert answer.status == 401 and answer.headers["WWW-Authenticate"] == "Bearer"
                    error = await made.error(answer)
                    assert words in str(error["message"])
                    assert error["type"] == "AuthenticationError"
            assert not instance.seen
            for header in ({"Authorization": f"bearer {key}"}, {"X-Api-Key": key}):
                async with made.client.get(f"{made.url}/v1/models", headers=header) as answer:
                    assert answer.status == 200
            assert not {"Authorization", "X-Api-Key"} & set(instance.seen[-1].headers)
            async with made.client.get(f"{made.url}/health") as answer:
                assert answer.status == 503  # no FFN member; but no key is asked for
            async with made.client.get(f"{made.url}/metrics") as answer:
                assert answer.status == 401
            bearer = {"Authorization": f"Bearer {key}"}
            waiting = asyncio.create_task(
                made.client.get(f"{made.url}/v1/wait", headers=bearer)  # type: ignore[arg-type]
            )
            while len(instance.seen) < 3:
                await asyncio.sleep(0.01)
            async with made.client.get(f"{made.url}/v1/models", headers=bearer) as answer:
                assert answer.status == 429 and answer.headers["Retry-After"] == "5"
                assert (await made.error(answer))["type"] == "RateLimitError"
            instance.go_on.set()
            assert (await waiting).status == 200
            async with made.client.get(f"{made.url}/metrics", headers=bearer) as answer:
                page = await answer.text()
            assert (
                'afd_gateway_refused_total{instance="gateway-0",reason="unauthorized"} 4.0' in page
            )
            assert 'reason="key_limit"} 1.0' in page

    run(check())


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Writes a self-signed certificate for 127.0.0.1 and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command, which makes the certificate")
    how = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1"
        f" -subj /CN=afd -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(how.split(), check=True, capture_output=True)
    return certificate, key


def test_https_serves_and_streams(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    settings = replace(QUICK, tls=server_context(certificate, key), max_connections=2)

    async def check() -> None:
        instance = FakeInstance()
        instance.go_on.set()
        trusted = ssl.create_default_context(cafile=str(certificate))
        async with rig(instance, settings=settings) as made:
            assert made.url.startswith("https://")
            async with made.client.get(f"{made.url}/v1/stream", ssl=trusted) as answer:
                assert (await answer.text()).endswith("data: [DONE]\n\n")
            # A client that speaks no TLS does not hold its place.
            with pytest.raises(aiohttp.ClientError):
                await made.client.get(made.url.replace("https", "http") + "/health")
            async with made.client.get(f"{made.url}/v1/models", ssl=trusted) as answer:
                assert answer.status == 200

    run(check())


def test_wrong_tls_files_name_the_key(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    _, foreign = make_certificate(other)
    with pytest.raises(ConfigError, match=r"gateway\.tls\.key: cannot read"):
        server_context(certificate, tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="not a PEM certificate and its key"):
        server_context(key, certificate)
    with pytest.raises(ConfigError, match=r"its key \(key values mismatch\)"):
        server_context(certificate, foreign)
