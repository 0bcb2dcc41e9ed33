"""`afd ctl add`, `remove`, `drain` and `restart` against a control plane with plain members."""

import http.server
import threading
from collections.abc import Callable, Iterator

import pytest
from control_support import (
    CONTRACT,
    KEYS,
    contract_with,
    control_client,
    control_server,
    eventually,
)

from afd.control import operator
from afd.control.client import ControlClient
from afd.control.messages import Members, Seat
from afd.errors import ConfigError, DeadlineExceeded
from afd.placement.tables import spread
from afd_launch import come_and_go
from afd_launch.come_and_go import Operator, tables_without


class Fleet:
    """Members that follow their seats, as supervisors and roles do. address: control plane's."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.running: dict[str, ControlClient] = {}
        self.starts: list[str] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self, role: str, index: int, api_url: str = "") -> None:
        client = control_client(self.address, role, index)
        client.join(deadline_s=5, api_url=api_url)
        client.set_state("ready")
        self.running[client.id] = client
        self.starts.append(client.id)

    def follow(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for client in self.running.values():
            client.leave()
            client.close()

    def _follow(self) -> None:
        while not self._stop.wait(0.05):
            members = operator.status(self.address, KEYS.operator)
            for name, client in [*self.running.items()]:
                seat = members.seat(name)
                wish = seat.wish if seat else "run"
                if wish == "remove" or (wish == "restart" and seat.generation == client.generation):
                    del self.running[name]  # before the operator sees that it has left
                    client.leave()
                    client.close()
                    if wish == "restart":
                        role, _, index = name.partition("-")
                        self.start(role, int(index))
            for seat in members.seats:
                if seat.wish == "run" and seat.id not in self.running:
                    role, _, index = seat.id.partition("-")
                    self.start(role, int(index))


@pytest.fixture
def fleet(monkeypatch) -> Iterator[Fleet]:
    """1A1F with room for a second attention instance."""
    monkeypatch.setattr(come_and_go, "SETTLE_S", 0.1)
    with control_server(attention=1, contract=CONTRACT) as server:
        fleet = Fleet(server.address)
        fleet.start("attention", 0)
        fleet.start("ffn", 0)
        yield fleet
        fleet.close()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def instances(fleet: Fleet, said: list[str]) -> Operator:
    return Operator(fleet.address, KEYS.operator, 10.0, said.append)


def test_add_and_remove(fleet: Fleet, instances: Operator, said: list[str]) -> None:
    fleet.follow()
    assert instances.add("attention") == "attention-1"
    assert "attention-1" in fleet.running
    with pytest.raises(ConfigError, match="all 2 attention instances are in use"):
        instances.add("attention")
    instances.remove("attention-0")
    assert [*fleet.running] == ["ffn-0", "attention-1"]
    with pytest.raises(ConfigError, match="add another one first"):
        instances.remove("attention-1")
    assert said == [
        "attention-1 starts",
        "attention-1 takes requests",
        "attention-0 leaves once its requests have finished",
        "attention-0 has left",
    ]


def test_a_rolling_restart_renews_every_instance(fleet: Fleet, instances: Operator) -> None:
    with pytest.raises(ConfigError, match="needs two attention instances"):
        instances.restart_all()
    fleet.follow()
    instances.add("attention")
    del fleet.starts[:]
    instances.restart_all()
    assert fleet.starts == ["attention-0", "attention-1", "ffn-0"]


def test_drain_and_undo(fleet: Fleet, instances: Operator) -> None:
    instances.drain("attention-0")
    assert operator.status(fleet.address, KEYS.operator).seat("attention-0").wish == "drain"
    instances.drain("attention-0", undo=True)
    assert operator.status(fleet.address, KEYS.operator).seat("attention-0").wish == "run"
    with pytest.raises(ConfigError, match="attention-1 does not run"):
        instances.drain("attention-1", undo=True)


def test_nobody_follows(fleet: Fleet) -> None:
    impatient = Operator(fleet.address, KEYS.operator, 0.3, lambda line: None)
    with pytest.raises(DeadlineExceeded, match="attention-1 did not become ready within"):
        impatient.add("attention")


def test_ready_means_that_its_api_server_answers(fleet: Fleet) -> None:
    def members() -> Members:
        return operator.status(fleet.address, KEYS.operator)

    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        fleet.start("attention", 1, f"http://127.0.0.1:{server.server_port}")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        is_ready: Callable[[], bool] = lambda: come_and_go.is_ready(members(), "attention-1")  # noqa: E731
        eventually(is_ready, 5)
        server.shutdown()
    assert not is_ready()


def test_ffn_instances_that_drain_get_no_experts() -> None:
    bounds = (0, 5, 10, 15)
    contract = contract_with(
        ffn_instances=3,
        elastic=True,
        expert_slots=bounds,
        expert_map=(spread(8, bounds, (0, 1), 1),) * 3,
    )
    seats = (Seat("ffn-0"), Seat("ffn-1", "drain"), Seat("ffn-2", "restart", 7), Seat("ffn-2.1"))
    tables = tables_without("", Members(seats=seats), contract)
    assert tables == (spread(8, bounds, (0, 2), 1),) * 3
    with pytest.raises(ConfigError, match="8 experts per layer do not fit on 1 FFN instances"):
        tables_without("ffn-2", Members(seats=seats), contract)
