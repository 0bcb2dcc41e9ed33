"""The gateway processes of `afd serve`: on a port that the supervisor holds, as real processes.

The control plane and the members are real; the attention instance's API server is a stand-in.
"""

import contextlib
import http.server
import os
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from control_support import FAST, KEYS, control_client, control_server, eventually

from afd.config.deployment import Deployment
from afd_gateway.inherited import HeldPort, held_port
from afd_launch.process import Command, RoleProcess
from afd_launch.readiness import Readiness
from afd_launch.roles_of_host import OPERATOR_KEYS, Ports, role_specs, stages, with_keys


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def api_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Gateways:
    """The processes of the gateway stage. A context manager: it ends them."""

    def __init__(self, commands: tuple[Command, ...], readiness: Readiness) -> None:
        self._commands = {command.name: command for command in commands}
        self._readiness = readiness
        self.running: dict[str, RoleProcess] = {}

    def __enter__(self) -> "Gateways":
        return self

    def __exit__(self, *_: object) -> None:
        for name in [*self.running]:
            self.end(name, signal.SIGKILL)

    def start(self, *names: str) -> None:
        self.running |= {name: RoleProcess.start(self._commands[name]) for name in names}

    def await_ready(self, *names: str) -> None:
        for name in names:
            group = self.running[name].group
            eventually(lambda: self._readiness.awaited(name, group) is None, 30)  # noqa: B023

    def end(self, name: str, number: signal.Signals) -> int:
        process = self.running.pop(name)
        process.signal(number)
        eventually(process.gone, 20)
        code = process.exit_code()
        process.close()
        assert code is not None
        return code


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.timeout(120)
def test_the_port_outlives_the_gateway_processes(tmp_path):
    KEYS.save(tmp_path / "given.keys")
    plain = {
        "model": "m",
        "control": {
            "keys": str(tmp_path / "given.keys"),
            "heartbeat_s": FAST.interval_s,
            "timeout_s": FAST.timeout_s,
        },
        "gateway": {"processes": 2},
    }
    with (
        control_server() as control,
        api_server() as api_url,
        control_client(control.address, "attention", 0) as attention,
        control_client(control.address, "ffn", 0) as ffn,
        held_port("127.0.0.1", 0, 2) as port,
    ):
        attention.join(api_url=api_url, deadline_s=5)
        ffn.join(deadline_s=5)
        for member in (attention, ffn):
            member.set_state("ready")
        serve(Deployment.from_plain(plain), control.address, port, tmp_path)


def serve(deployment: Deployment, control: str, port: HeldPort, folder) -> None:
    with socket.socket(fileno=os.dup(port.inherited.listener)) as copy:
        number = copy.getsockname()[1]
    url = f"http://127.0.0.1:{number}"
    specs = role_specs(deployment, Ports(number, (1,), control), range(2))
    specs = with_keys(specs, folder)
    commands = stages(specs, folder, port.inherited)[-1].commands
    both = tuple(command.name for command in commands)
    assert both == ("gateway-0", "gateway-1")
    with (
        Readiness(specs, folder / OPERATOR_KEYS) as readiness,
        Gateways(commands, readiness) as gateways,
    ):
        with pytest.raises(urllib.error.URLError, match="refused"):
            status_of(url)  # bound, but nobody has served yet
        gateways.start(*both)
        gateways.await_ready(*both)
        assert status_of(url) == 200
        page = urllib.request.urlopen(f"{url}/metrics", timeout=5).read().decode()
        for name in both:
            assert f'afd_gateway_upstream_up{{gateway="{name}",instance="attention-0"}} 1' in page

        gateways.end("gateway-0", signal.SIGKILL)
        assert [status_of(url) for _ in range(10)] == [200] * 10
        gateways.end("gateway-1", signal.SIGKILL)

        told: list[int] = []
        asking = threading.Thread(target=lambda: told.append(status_of(url)))
        asking.start()  # connects while no process lives
        asking.join(0.3)
        assert asking.is_alive()
        gateways.start("gateway-0")
        asking.join(30)
        assert told == [200]

        gateways.await_ready("gateway-0")
        port.refuse()  # as the supervisor does before it stops the roles
        with pytest.raises(urllib.error.URLError, match="refused"):
            status_of(url)
        assert gateways.end("gateway-0", signal.SIGTERM) == 0
