"""One instance on Ray, as the driver drives it: a stand-in for Ray answers the actor's calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from afd.config.sections import Restart
from afd.errors import ConfigError
from afd_launch.ray_cluster.placed import BURY_S, RETRY_S, Placed, Surroundings
from afd_launch.ray_cluster.plan import Instance


class ActorError(Exception):
    pass


class Cluster:
    """The part of Ray that is used. calls: of the actor so far. answer: of the next call; an
    exception is raised; None: the call runs on."""

    exceptions = SimpleNamespace(RayActorError=ActorError)

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer: Any = "10.0.0.7"

    def __getattr__(self, method: str) -> Any:  # the actor's methods
        def call(*arguments: Any) -> object:
            self.calls.append((method, *arguments))
            return object()

        return SimpleNamespace(remote=call)

    def wait(self, references: list[object], timeout: float) -> tuple[list[object], list[object]]:
        assert timeout == 0, "the driver must not wait for one instance"
        return ([], references) if self.answer is None else (references, [])

    def get(self, reference: object) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Driven:
    """An instance and its cluster. turn: one call is begun or its answer taken."""

    def __init__(self) -> None:
        self.ray, self.output = Cluster(), list[tuple[str, bytes]]()
        around = Surroundings(
            self.ray,
            lambda instance: {"deployment.yaml": instance.name},
            lambda member, data: self.output.append((member, data)),
            lambda member: f"{member}: no such model",
            "tcp://10.0.0.1:5555",
            Restart(max_restarts=2),
        )
        self.placed = Placed(around, Instance("ffn", 1, 2, 0), self.ray, 7.0)

    def turn(
        self, now: float, answer: Any = None, wish: Any = "run", serving: bool = True
    ) -> tuple[Any, ...]:
        """Returns the last call."""
        self.ray.answer = answer
        self.placed.turn(now, wish, serving=serving)
        return self.ray.calls[-1] if self.ray.calls else ()


QUIET: tuple[dict[str, bytes], None] = ({"ffn-1": b"", "ffn-1.1": b""}, None)
DEAD = ({"ffn-1": b"bye", "ffn-1.1": b""}, ("ffn-1.1", "was killed by SIGKILL"))
START = ("start", {"deployment.yaml": "ffn-1"}, "tcp://10.0.0.1:5555")


@pytest.fixture
def runs() -> Driven:
    driven = Driven()
    assert driven.turn(0.0) == START
    assert driven.turn(0.1) == START, "the call has not returned; nothing else is called"
    driven.turn(0.2, "10.0.0.7")
    assert driven.turn(0.3) == ("poll",)
    return driven


def test_a_rank_that_dies_takes_its_instance_with_it_and_it_starts_again(runs: Driven) -> None:
    assert runs.turn(1.0, DEAD) == ("stop", BURY_S)
    runs.turn(1.1, {"ffn-1": b"gone\n", "ffn-1.1": b""})
    assert runs.output == [
        ("ffn-1", b"bye"),
        ("ffn-1.1", b""),
        ("ffn-1", b"gone\n"),
        ("ffn-1.1", b""),
    ]
    assert runs.turn(1.2) == START


def test_deaths_are_counted(runs: Driven) -> None:
    def dies(now: float) -> None:
        runs.turn(now, DEAD)
        runs.turn(now, {})
        runs.turn(now + 20)  # after the back-off
        runs.turn(now + 20, "10.0.0.7")
        runs.turn(now + 20)

    dies(1.0)
    dies(22.0)
    with pytest.raises(ConfigError, match=r"more than restart\.max_restarts = 2 times within 60 s"):
        dies(43.0)


def test_before_the_deployment_is_ready_an_end_is_the_roles_own_error(runs: Driven) -> None:
    runs.turn(1.0, DEAD, serving=False)
    with pytest.raises(ConfigError, match=r"^ffn-1\.1: no such model$"):
        runs.turn(1.1, {}, serving=False)


def test_a_lost_node_is_one_death_however_long_ray_takes(
    runs: Driven, capsys: pytest.CaptureFixture[str]
) -> None:
    runs.turn(1.0, ActorError())
    now = 1.1
    for _ in range(10):  # more than restart.max_restarts
        assert runs.turn(now) == START
        runs.turn(now, ActorError())
        calls = len(runs.ray.calls)
        runs.turn(now + RETRY_S / 2)
        assert len(runs.ray.calls) == calls, "not yet"
        now += RETRY_S
    runs.turn(now)
    runs.turn(now, "10.0.0.8")
    said = capsys.readouterr().out
    assert said.count("waits until Ray has placed it again") == 1
    assert "ffn-1 starts on 10.0.0.8" in said


@pytest.mark.parametrize("then", ["run", "away"])
def test_an_instance_leaves_when_an_operator_wants_it(runs: Driven, then: str) -> None:
    runs.turn(1.0, QUIET)
    assert runs.turn(1.1, wish="leave") == ("stop", 7.0)
    runs.turn(1.2, {}, wish="leave")
    calls = len(runs.ray.calls)
    runs.turn(1.3, wish="leave")
    assert len(runs.ray.calls) == calls, "the control plane has not seen that it left"
    runs.turn(1.4, wish=then)
    assert (runs.ray.calls[-1] == START) == (then == "run")
