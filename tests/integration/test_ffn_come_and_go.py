"""FFN instances are added, drained, removed and killed under load: no request fails or changes.

./run test -m long tests/integration/test_ffn_come_and_go.py; AFD_TEST_SEED repeats the moments.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
from deployments import Host
from helpers import HEALTH_S, Running, wait_until
from steady_load import Load

from afd.control.local_keys import operator_keys
from afd.control.messages import Members
from afd.errors import ConfigError
from afd_launch.come_and_go import Operator

pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = [pytest.mark.serve, pytest.mark.long]

SEED = os.environ.get("AFD_TEST_SEED", str(time.time_ns()))


@pytest.fixture(params=["grow_1A1F", "grow_2A2F", "grow_shared", "grow_ranks"])
def deployment(host: Host, request: pytest.FixtureRequest) -> Running:
    return host.serve(str(request.param))


@pytest.fixture
def instances(deployment: Running) -> Operator:
    control = deployment.server.control
    return Operator(control, operator_keys(control), 180)


@pytest.fixture
def load(deployment: Running, terse: dict[str, float]) -> Iterator[Load]:
    with Load(deployment.url, terse) as load:
        yield load


def computed(deployment: Running, member: str) -> float:
    return sum(deployment.metrics().values("afd_expert_rows_total", instance=member))


def test_added_drained_and_removed(deployment: Running, instances: Operator, load: Load) -> None:
    load.whole_rounds(1)
    name = instances.add("ffn")
    load.whole_rounds()
    assert computed(deployment, name) > 0
    with pytest.raises(ConfigError, match="FFN instances are in use"):
        instances.add("ffn")
    instances.drain(name)
    idle = computed(deployment, name)
    load.whole_rounds()
    assert computed(deployment, name) == idle
    instances.drain(name, undo=True)
    load.whole_rounds()
    assert computed(deployment, name) > idle
    instances.restart(name)
    load.whole_rounds()
    if name == "ffn-2":  # not the last one that came, but one of the start
        instances.remove("ffn-1")
        load.whole_rounds()
        assert deployment.members().find("ffn", 1) is None
        assert instances.add("ffn") == "ffn-1"
        load.whole_rounds(1)
    instances.remove(name)
    assert deployment.members().find("ffn", int(name[-1])) is None
    load.whole_rounds()
    with pytest.raises(ConfigError, match="leads the FFN instances"):
        instances.remove("ffn-0")
    if name == "ffn-2":
        with pytest.raises(ConfigError, match="do not fit on 1 FFN instances"):
            instances.remove("ffn-1")
    assert deployment.is_whole()


def joins(members: Members, index: int) -> bool:
    return members.find("ffn", index) is not None


def moves(members: Members, index: int) -> bool:
    return members.moving is not None and joins(members, index)


def is_asked(members: Members, index: int) -> bool:
    """Attention instances begin to use it."""
    return members.switching and moves(members, index)


def seen(
    moment: Callable[[Members, int], bool],
    deployment: Running,
    index: int,
    adding: Future[str],
) -> bool:
    """Waits for the moment. Returns False if the instance was added before it was seen."""
    end = time.monotonic() + 120
    while not moment(deployment.members(), index):
        assert time.monotonic() < end
        if adding.done():
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize("moment", [joins, moves, is_asked])
def test_killed_while_it_joins(
    deployment: Running,
    instances: Operator,
    load: Load,
    moment: Callable[[Members, int], bool],
) -> None:
    draw = random.Random(f"{SEED} {moment.__name__}")
    index = len(deployment.members().of("ffn"))
    load.whole_rounds(1)
    with ThreadPoolExecutor(1) as pool:
        adding: Future[str] = pool.submit(instances.add, "ffn")
        while not seen(moment, deployment, index, adding):  # on slow cores it may be missed
            instances.remove(adding.result())
            adding = pool.submit(instances.add, "ffn")
        time.sleep(draw.uniform(0, 0.3))
        before = deployment.member(f"ffn-{index}")
        os.kill(before.pid, signal.SIGKILL)
        assert adding.result(200) == f"ffn-{index}"
    wait_until(lambda: deployment.is_back(before), HEALTH_S, "it is back")
    assert deployment.member(f"ffn-{index}").generation > before.generation
    load.whole_rounds()
    assert computed(deployment, f"ffn-{index}") > 0
    instances.remove(f"ffn-{index}")
    load.whole_rounds(1)
