"""Only some attention instances get requests while their stage times are measured."""

from pathlib import Path

import pytest

from afd_bench import servers
from afd_bench.servers import Server


@pytest.fixture
def wishes(monkeypatch):
    found: list[tuple[str, str, str]] = []

    def set_seat(address: str, *, member: str, wish: str) -> None:
        found.append((address, member, wish))

    monkeypatch.setattr(servers, "set_seat", set_seat)
    monkeypatch.setattr(servers, "_SEATS_S", 0.0)
    return found


SERVER = Server("http://127.0.0.1:1", "model", Path("log"), "tcp://127.0.0.1:2", 1)


def test_the_others_are_drained_and_come_back_also_after_an_error(wishes):
    with pytest.raises(RuntimeError), SERVER.active(1, 3):
        drained = [(SERVER.control, f"attention-{i}", "drain") for i in (1, 2)]
        assert wishes == drained
        raise RuntimeError
    assert wishes[2:] == [(SERVER.control, f"attention-{i}", "run") for i in (1, 2)]


def test_with_all_of_them_nothing_is_asked(wishes):
    with SERVER.active(2, 2):
        pass
    assert wishes == []
