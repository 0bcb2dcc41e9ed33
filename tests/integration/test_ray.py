"""`afd serve FILE --ray` on two raylets of this machine: placement, restarts, a lost node, stop."""

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
from deployments import BLOCK, SETTINGS, Models
from helpers import Stream, answers, processes_of, tokens_of, wait_until

from afd.control import operator
from afd.control.keys import CurveKeys
from afd.host.ports import held_ports

pytestmark = [pytest.mark.serve, pytest.mark.long]


@dataclass(frozen=True)
class OnRay:
    process: "subprocess.Popen[bytes]"
    cluster: Any
    second: Any
    url: str
    control: str
    keys: CurveKeys
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """pid of every ready instance, by member id."""
        found = operator.status(self.control, self.keys.operator).members
        return {m.id: m.pid for m in found if m.state == "ready" and m.role != "gateway"}

    def is_whole(self) -> bool:
        assert self.process.poll() is None, self.log[-3000:]
        try:
            return answers(f"{self.url}/health") and len(self.pids()) == 3
        except Exception:
            return False

    def serves(self, name: str) -> None:
        stream = Stream(self.url, tokens_of(name, 20), 12).start().join(90)
        assert stream.error is None and len(stream.tokens) == 12, self.log[-3000:]


@pytest.fixture(scope="module")
def on_ray(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OnRay]:
    pytest.importorskip("ray", reason="ray is not installed; pip install ray")
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray")
    keys = CurveKeys.generate()
    keys.save(folder / "control.keys")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4})
    second = cluster.add_node(num_cpus=4)
    cluster.wait_for_nodes()
    with held_ports(["127.0.0.1"] * 2) as (port, control_port):
        control = f"tcp://127.0.0.1:{control_port}"
        config = {
            "model": str(tiny_models("qwen3_moe")),
            "served_model_name": "model",
            "attention": {**SETTINGS, "port": 0, "vllm_args": [BLOCK]},
            "ffn": {"instances": 2, "threads": 1},
            "pipeline": {"min_rows": 1},
            "transport": {"backend": "tcp"},
            "control": {"address": control, "keys": str(folder / "control.keys")},
            "gateway": {"port": port},
            "restart": {"max_restarts": 5},
        }
        (folder / "deployment.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "afd_launch.cli", "serve", str(folder / "deployment.yaml")]
        with (folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--ray", cluster.address],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "TMPDIR": str(folder), "XDG_RUNTIME_DIR": ""},
            )
        url = f"http://127.0.0.1:{port}"
        made = OnRay(process, cluster, second, url, control, keys, folder)
        try:
            wait_until(made.is_whole, 200, "the deployment on Ray is whole")
            yield made
        finally:
            if process.poll() is None:
                process.kill()
            cluster.shutdown()


def test_it_serves(on_ray: OnRay) -> None:
    on_ray.serves("first")
    assert "on Ray: model model, 1 attention + 2 FFN" in on_ray.log


def test_a_killed_ffn_instance_comes_back_and_no_token_is_lost(on_ray: OnRay) -> None:
    before = on_ray.pids()["ffn-1"]
    stream = Stream(on_ray.url, tokens_of("killed", 10), 200).start()
    wait_until(lambda: len(stream.tokens) > 5, 60, "the stream has begun")
    os.kill(before, signal.SIGKILL)
    stream.join(120)
    assert stream.error is None and len(stream.tokens) == 200
    wait_until(lambda: on_ray.pids().get("ffn-1", before) != before, 60, "ffn-1 is another process")
    assert "ffn-1 was killed by SIGKILL; starting ffn-1 again in" in on_ray.log


def test_instances_of_a_lost_node_move(on_ray: OnRay) -> None:
    before = on_ray.pids()
    on_ray.cluster.remove_node(on_ray.second, allow_graceful=False)
    wait_until(lambda: "or its actor is gone" in on_ray.log, 60, "the driver notices")
    wait_until(on_ray.is_whole, 200, "the deployment is whole again")
    moved = [name for name, pid in on_ray.pids().items() if before[name] != pid]
    assert moved, "SPREAD puts at least one instance on the second node"
    wait_until(lambda: answers(f"{on_ray.url}/health"), 60, "the gateway is ready")
    on_ray.serves("moved")


def test_it_stops_in_order_and_leaves_nothing(on_ray: OnRay) -> None:
    on_ray.process.send_signal(signal.SIGTERM)
    assert on_ray.process.wait(60) == 0, on_ray.log[-3000:]
    assert "stopped" in on_ray.log.splitlines()[-1]
    left = {p: text for p, text in processes_of(on_ray.folder).items() if "afd_launch" in text}
    assert left == {}
