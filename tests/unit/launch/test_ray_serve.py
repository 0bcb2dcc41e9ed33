"""`afd serve FILE --ray` on two raylets of this machine, with roles that only register.

Placement, restarts, a lost node and the order of the end are Ray's and the driver's; the roles need
neither vLLM nor torch for that.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from afd.control import operator
from afd.control.keys import CurveKeys
from afd.errors import AfdError
from afd.host.ports import held_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # Ray takes a minute to miss a node

ROLES = Path(__file__).parent / "ray_roles"


def await_true(check: Callable[[], bool], deadline_s: float, what: str) -> None:
    ends = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < ends, f"not within {deadline_s:g} s: {what}"
        time.sleep(0.2)


@dataclass(frozen=True)
class OnRay:
    process: "subprocess.Popen[bytes]"
    cluster: Any
    second: Any
    control: str
    keys: CurveKeys
    folder: Path

    @property
    def log(self) -> str:
        return (self.folder / "serve.log").read_text(errors="replace")

    def pids(self) -> dict[str, int]:
        """pid of every ready attention and FFN member."""
        assert self.process.poll() is None, self.log[-3000:]
        try:
            found = operator.status(self.control, self.keys.operator, deadline_s=2).members
        except AfdError:
            return {}
        return {m.id: m.pid for m in found if m.state == "ready" and m.role in ("attention", "ffn")}

    def is_whole(self) -> bool:
        return set(self.pids()) == {"attention-0", "ffn-0", "ffn-0.1", "ffn-1", "ffn-1.1"}


@pytest.fixture(scope="module")
def on_ray(
    tiny_models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OnRay]:
    pytest.importorskip("ray", reason="ray is not installed; pip install 'afd[ray]'")
    from ray.cluster_utils import Cluster

    folder = tmp_path_factory.mktemp("ray")
    keys = CurveKeys.generate()
    keys.save(folder / "control.keys")
    with pytest.MonkeyPatch.context() as patch, held_ports(["127.0.0.1"] * 2) as ports:
        patch.setenv("PYTHONPATH", str(ROLES))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 5})
        second = cluster.add_node(num_cpus=5)
        cluster.wait_for_nodes()
        control = f"tcp://127.0.0.1:{ports[1]}"
        config = {
            "model": str(tiny_models("qwen3_moe")),
            "ffn": {"instances": 2, "tp": 2},
            "control": {"address": control, "keys": str(folder / "control.keys")},
            "gateway": {"port": ports[0]},
            "deadlines": {"drain_s": 1},
            "restart": {"max_restarts": 5},
        }
        (folder / "deployment.yaml").write_text(yaml.safe_dump(config))
        command = [sys.executable, "-m", "afd_launch.cli", "serve", str(folder / "deployment.yaml")]
        with (folder / "serve.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--ray", cluster.address], stdout=log, stderr=subprocess.STDOUT
            )
        made = OnRay(process, cluster, second, control, keys, folder)
        try:
            await_true(made.is_whole, 90, "every member is ready")
            yield made
        finally:
            if process.poll() is None:
                process.kill()
            cluster.shutdown()


def test_it_places_restarts_moves_and_stops(on_ray: OnRay) -> None:
    await_true(lambda: "ready after" in on_ray.log, 20, "the driver says so")
    first = on_ray.pids()

    # A rank that dies takes its instance with it, and only that one starts again.
    os.kill(first["ffn-1.1"], signal.SIGKILL)
    await_true(lambda: on_ray.is_whole() and on_ray.pids() != first, 60, "ffn-1 is back")
    second = on_ray.pids()
    assert {m for m in first if first[m] != second[m]} == {"ffn-1", "ffn-1.1"}
    assert "ffn-1.1 was killed by SIGKILL; starting ffn-1 again in" in on_ray.log

    # A lost node: its instances start on the other one.
    on_ray.cluster.remove_node(on_ray.second, allow_graceful=False)
    await_true(lambda: "its actor is gone; starting" in on_ray.log, 60, "the driver notices")
    await_true(on_ray.is_whole, 90, "every member is ready again")
    third = on_ray.pids()
    moved = {m for m, pid in third.items() if second[m] != pid}
    assert moved, "SPREAD puts at least one instance on the second node"

    on_ray.process.send_signal(signal.SIGTERM)
    assert on_ray.process.wait(60) == 0, on_ray.log[-3000:]
    assert "stopped" in on_ray.log.splitlines()[-1]
    assert not [m for m, pid in third.items() if Path(f"/proc/{pid}").exists()]
