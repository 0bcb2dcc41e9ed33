"""`afd serve FILE --ray` on two raylets of this machine serves the demo model with real vLLM.

The answers equal those of the same file under plain `afd serve`. Placement and limits are tested
with stand-ins for the roles (tests/unit/launch/test_ray_serve.py).
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers import (
    Stream,
    all_begun,
    environment,
    openai_client,
    processes_of,
    tokens_of,
    tokens_when_whole,
    wait_until,
)
from leftovers import shared_memory

from afd.control import operator
from afd.control.keys import CurveKeys
from afd.control.messages import Members
from afd.errors import AfdError
from afd.host.ports import accepts, held_ports
from afd_bench.servers import disaggregated, tail
from afd_launch.demo import CONFIG, TRAINED

pytestmark = [pytest.mark.serve, pytest.mark.long, pytest.mark.timeout(600)]

PROMPTS = [tokens_of(f"ray{number}", 5 + 9 * number) for number in range(4)]
NEW_TOKENS = 120
QUESTION = [{"role": "user", "content": "Tell me a story about a fox and a lantern."}]


def deployment() -> dict[str, Any]:
    """The demo's file; float32, so that an answer does not depend on the batch beside it."""
    config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    config["model"] = str(TRAINED)
    config["attention"] |= {"dtype": "float32", "max_num_seqs": 8, "kv_cache_gib": 0.1}
    config["deadlines"] = {"ffn_s": 150, "drain_s": 20}  # Ray may take a minute to miss a node
    config["gateway"] = {"replay_s": 240}
    config["restart"] = {"max_restarts": 10}
    return config


def story(url: str) -> str:
    chat = openai_client(url).chat.completions
    answer = chat.create(model="demo", messages=QUESTION, max_tokens=60, temperature=0)  # type: ignore[arg-type]
    return answer.choices[0].message.content or ""


def load(url: str) -> list[Stream]:
    return [Stream(url, prompt, NEW_TOKENS, model="demo").start() for prompt in PROMPTS]


Nodes = tuple[Any, Any, Path]


@dataclass(frozen=True)
class Plain:
    """What plain `afd serve` answers. tokens: to PROMPTS."""

    story: str
    tokens: list[list[int]]


@pytest.fixture(scope="module")
def plain() -> Plain:
    with disaggregated(deployment()) as server:
        return Plain(story(server.url), tokens_when_whole(load(server.url), 120))


@dataclass(frozen=True)
class OnRay:
    """nodes, driver: TMPDIR of the raylets and of `afd serve`."""

    process: "subprocess.Popen[bytes]"
    cluster: Any
    second: Any
    url: str
    control: str
    keys: CurveKeys
    nodes: Path
    driver: Path
    shm_before: frozenset[str]

    @property
    def log(self) -> Path:
        return self.driver / "serve.log"

    def is_ready(self) -> bool:
        assert self.process.poll() is None, tail(self.log, 60)
        return "ready after" in self.log.read_text()

    def members(self) -> Members:
        assert self.process.poll() is None, tail(self.log, 60)
        return operator.status(self.control, self.keys.operator)

    def pid(self, member: str) -> int:
        return next(m.pid for m in self.members().members if m.id == member)

    def generations(self) -> dict[str, int]:
        """Of every ready member; {} while the control plane does not answer."""
        try:
            return {m.id: m.generation for m in self.members().members if m.state == "ready"}
        except AfdError:
            return {}

    def left_over(self) -> list[str]:
        """What the deployment left; the raylets still run."""
        found = {**processes_of(self.nodes), **processes_of(self.driver)}
        ours = ("afd_", "vllm", "VLLM", "Keeper")
        return [
            *(f"{pid} {text}" for pid, text in found.items() if any(word in text for word in ours)),
            *(str(path) for path in self.nodes.glob("afd*")),
            *(str(path) for path in self.driver.iterdir() if path.suffix not in (".log", ".yaml")),
            *(f"shared memory {name}" for name in shared_memory() - self.shm_before),
            *(["the gateway's port"] if accepts("127.0.0.1", int(self.url.split(":")[2])) else []),
        ]


@pytest.fixture(scope="module")
def nodes(
    plain: Plain, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Any, Any, Path]]:
    """A cluster of two raylets, its second raylet, and their TMPDIR.

    plain: has ended before this begins; the machine may have two cores.
    """
    pytest.importorskip("ray", reason="ray is not installed; pip install 'afd[ray]'")
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("nodes")
    with environment(TMPDIR=str(folder), XDG_RUNTIME_DIR="", RAY_USAGE_STATS_ENABLED="0"):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
        second = cluster.add_node(num_cpus=2)
        cluster.wait_for_nodes()
        yield cluster, second, folder
        cluster.shutdown()


@contextlib.contextmanager
def served(nodes: Nodes, driver: Path) -> Iterator[OnRay]:
    """The deployment on Ray, once it is ready."""
    cluster, second, folder = nodes
    keys = CurveKeys.generate()
    keys.save(driver / "keys.yaml")
    with held_ports(["127.0.0.1"] * 2) as (port, control_port):
        config, control = deployment(), f"tcp://127.0.0.1:{control_port}"
        config["gateway"]["port"] = port
        config["control"] = {"address": control, "keys": str(driver / "keys.yaml")}
        file = driver / "deployment.yaml"
        file.write_text(yaml.safe_dump(config))
        argv = [sys.executable, "-m", "afd_launch.cli", "serve", str(file), "--ray"]
        before = shared_memory()
        with environment(TMPDIR=str(driver)), (driver / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                [*argv, cluster.address], stdout=log, stderr=subprocess.STDOUT
            )
        url = f"http://127.0.0.1:{port}"
        made = OnRay(process, cluster, second, url, control, keys, folder, driver, before)
        try:
            wait_until(made.is_ready, 120, "the deployment is ready")
            yield made
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def on_ray(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    with served(nodes, tmp_path_factory.mktemp("driver")) as made:
        yield made


def test_it_answers_as_plain_afd_serve(plain: Plain, on_ray: OnRay) -> None:
    assert {"attention-0", "ffn-0"} <= on_ray.generations().keys()
    assert story(on_ray.url) == plain.story
    assert tokens_when_whole(load(on_ray.url), 120) == plain.tokens


def test_an_ffn_killed_under_load_costs_no_request(plain: Plain, on_ray: OnRay) -> None:
    before = on_ray.generations()
    streams = load(on_ray.url)
    all_begun(streams)
    os.kill(on_ray.pid("ffn-0"), signal.SIGKILL)
    assert tokens_when_whole(streams, 120) == plain.tokens
    after = on_ray.generations()
    assert after["ffn-0"] > before["ffn-0"] and after["attention-0"] == before["attention-0"]


def test_an_operator_restarts_an_instance_under_load(plain: Plain, on_ray: OnRay) -> None:
    before = on_ray.generations()
    streams = load(on_ray.url)
    all_begun(streams)
    operator.set_seat(on_ray.control, on_ray.keys.operator, member="ffn-0", wish="restart")
    assert tokens_when_whole(streams, 120) == plain.tokens
    assert on_ray.generations()["ffn-0"] > before["ffn-0"]
    assert "ffn-0 has left" in on_ray.log.read_text()


def test_a_lost_node_costs_no_request(plain: Plain, on_ray: OnRay) -> None:
    before = on_ray.generations()
    streams = load(on_ray.url)
    all_begun(streams)
    on_ray.cluster.remove_node(on_ray.second, allow_graceful=False)
    assert tokens_when_whole(streams, 200) == plain.tokens
    after = on_ray.generations()
    moved = {m for m in ("attention-0", "ffn-0") if after[m] > before[m]}
    assert len(moved) == 1, "SPREAD puts one instance on each node"


def test_sigterm_leaves_nothing(on_ray: OnRay) -> None:
    on_ray.process.send_signal(signal.SIGTERM)
    assert on_ray.process.wait(60) == 0, tail(on_ray.log)
    assert "stopped" in on_ray.log.read_text().splitlines()[-1]
    wait_until(lambda: not on_ray.left_over(), 15, f"nothing is left of {on_ray.left_over()}")


def test_a_killed_driver_leaves_nothing(nodes: Nodes, tmp_path: Path) -> None:
    with served(nodes, tmp_path) as made:
        made.process.kill()
        made.process.wait()
        wait_until(lambda: not made.left_over(), 40, f"nothing is left of {made.left_over()}")
