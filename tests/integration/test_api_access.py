"""What another local user sees of a default deployment: ports, files and credentials."""

import contextlib
import json
import os
import stat
import urllib.request
from collections import Counter
from pathlib import Path

import psutil
import pytest
import zmq
from deployments import Host
from helpers import Running, openai_client, processes_of
from roles import afd

from afd.control import messages as m
from afd.control.address import parse

pytestmark = pytest.mark.serve


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("openai")


def run_dir(deployment: Running) -> Path:
    (found,) = [path for path in deployment.folder.iterdir() if (path / "control-0.json").exists()]
    return found


def listeners(deployment: Running) -> dict[tuple[str, int], int]:
    """Returns (address, port) -> pid of the deployment's listening TCP and datagram sockets."""
    found = {}
    for pid in processes_of(deployment.folder):
        with contextlib.suppress(psutil.NoSuchProcess):
            for one in psutil.Process(pid).net_connections("inet"):
                if one.status == psutil.CONN_LISTEN or one.type == 2:  # SOCK_DGRAM
                    found[one.laddr.ip, one.laddr.port] = pid
    return found


def test_every_listener_is_named_by_settings_or_status(deployment: Running) -> None:
    """The data plane listens at transport.host: one Region per process, and in FFN ranks a second
    one for orders. Only torch in attention instances adds listeners: process groups on loopback."""
    control = parse(deployment.server.control)
    named = {("127.0.0.1", control.port), ("127.0.0.1", int(deployment.url.rsplit(":", 1)[1]))}
    members = deployment.members().members
    for member in members:
        for url in filter(None, (member.api_url, member.metrics_url)):
            host, _, port = url.partition("://")[2].partition("/")[0].rpartition(":")
            named.add((host, int(port)))
    engines = {member.pid for member in members if member.role == "attention"}
    ranks = {member.pid for member in members if member.role == "ffn"}
    unexpected = []
    regions = Counter[int]()
    for (address, port), pid in listeners(deployment).items():
        if (address, port) in named:
            continue
        if pid in engines and address == "127.0.0.1":
            continue  # torch's single-rank process groups
        if pid in ranks and address == "127.0.0.1" and regions[pid] < 2:
            regions[pid] += 1
            continue
        unexpected.append((address, port, pid))
    assert unexpected == []


def test_files_are_private_to_the_owner(deployment: Running) -> None:
    folder = run_dir(deployment)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    secrets = [path for path in folder.iterdir() if path.suffix in (".json", ".keys")]
    assert len(secrets) >= 9
    for path in secrets:
        assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (0o600, os.geteuid())
    for path in Path("/dev/shm").glob("afd*"):
        with contextlib.suppress(FileNotFoundError):
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_role_files_hold_no_keys_of_others(deployment: Running) -> None:
    folder = run_dir(deployment)
    whole = json.loads((folder / "control-0.keys").read_text())
    for name in ("attention-0", "ffn-0", "gateway-0"):
        text = (folder / f"{name}.keys").read_text() + (folder / f"{name}.json").read_text()
        assert whole["server_secret"] not in text and whole["client_secret"] not in text


def test_strangers_learn_nothing(deployment: Running) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(deployment.server.control)
        for message in (m.Hello("attention", 0, None), m.Status(), m.Shutdown()):
            with contextlib.suppress(zmq.Again):
                stranger.send(m.encode(message), zmq.NOBLOCK)
        assert not stranger.poll(1500)
    assert deployment.is_whole()


def test_the_owner_needs_no_key_file(deployment: Running, tmp_path: Path) -> None:
    known = afd("ctl", "--control", deployment.server.control, "status", folder=tmp_path)
    assert known.status == 0 and "attention-0  ready" in known.out
    assert "token" not in known.out


def test_credentials_stay_at_the_gateway(deployment: Running) -> None:
    """The instance serves without credentials, and the log shows no key."""
    with openai_client(deployment.url).with_options(api_key="sk-secret-4711") as client:
        client.completions.create(model="model", prompt="x", max_tokens=2)
    assert "sk-secret-4711" not in deployment.server.log.read_text(errors="replace")
    with urllib.request.urlopen(f"{deployment.url}/health", timeout=5) as answer:
        assert answer.status == 200
