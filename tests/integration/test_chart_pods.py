"""The commands of the Helm chart's pods, run as processes: a release without a cluster.

Every container's command and environment come from the rendered chart. Pods that share the network
of their node (rdma.hostNetwork) differ by their ports, so that all of them fit on one host. The
FFN instance has two ranks. Its probe scripts are the kubelet's.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployments import BLOCK, SETTINGS, Models
from helpers import Stream, answers, tokens_of, wait_until
from roles import afd, role

from afd.host.ports import held_ports

PACKAGING = Path(__file__).parents[1] / "packaging"
pytestmark = [pytest.mark.serve, pytest.mark.long]


@dataclass(frozen=True)
class Pod:
    """A container as a process. environment: without this machine's own."""

    container: dict[str, Any]
    environment: dict[str, str]
    folder: Path

    def command(self) -> list[str]:
        entry = self.container.get("command", ["afd"])
        return [self._here(word) for word in [*entry, *self.container.get("args", [])]]

    def probe(self, name: str) -> bool:
        """Runs a probe as the kubelet does."""
        probe = [self._here(word) for word in self.container[name]["exec"]["command"]]
        done = subprocess.run(
            probe, env=os.environ | self.environment, capture_output=True, timeout=10, check=False
        )
        return done.returncode == 0

    def _here(self, word: str) -> str:
        return word.replace("/etc/afd", str(self.folder))


@pytest.fixture(scope="module")
def pods(
    tiny_models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Pod | str]]:
    sys.path.insert(0, str(PACKAGING))
    support = pytest.importorskip("helm_support")
    folder = tmp_path_factory.mktemp("pods")
    stack = contextlib.ExitStack()
    port, control = stack.enter_context(held_ports(["127.0.0.1"] * 2))
    rendered = support.render(
        {
            "deployment": {
                "attention": {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK]},
                "ffn": {"tp": 2, "threads": 1},
                "pipeline": {"min_rows": 1},
                "transport": {"backend": "tcp"},
            },
            "model": {
                "volume": {"emptyDir": {}},
                "mountPath": str(tiny_models("qwen3_moe")),
                "name": "model",
            },
            "rdma": {"enabled": True, "hostNetwork": True},
        }
    )
    (folder / "keys").mkdir()
    assert afd("keys", str(folder / "keys" / "control.keys"), folder=folder).status == 0
    files = rendered["ConfigMap", "afd"]["data"]
    (folder / "run").mkdir()
    for name, text in files.items():
        (folder / "run" / name).write_text(text)
    file = yaml.safe_load(files["deployment.yaml"].replace("/etc/afd", str(folder)))
    file["control"]["address"] = f"tcp://127.0.0.1:{control}"
    file["gateway"] = {"port": port}
    (folder / "deployment.yaml").write_text(yaml.safe_dump(file))
    made: dict[str, Pod | str] = {"url": f"http://127.0.0.1:{port}"}
    with stack:
        for component in ("control", "gateway", "ffn", "attention"):
            container = rendered.container(component)
            values = {e["name"]: e["value"] for e in container["env"] if "value" in e}
            values |= {"POD_IP": "127.0.0.1", "AFD_INDEX": "0", "HOME": str(folder)}
            values["AFD_FILE"] = str(folder / "deployment.yaml")
            pod = made[component] = Pod(container, values, folder)
            here = f"tcp://127.0.0.1:{control}"
            command = [word.replace("tcp://*:5555", here) for word in pod.command()]
            with pytest.MonkeyPatch.context() as patch:
                for name, value in values.items():
                    patch.setenv(name, value)
                stack.enter_context(role(component, *command, folder=folder, program=()))
        yield made


def test_a_release_serves_and_its_probes_tell(pods: dict[str, Any]) -> None:
    """The FFN pod becomes ready before the gateway; all probes pass once a request is served."""
    attention, ffn, url = pods["attention"], pods["ffn"], pods["url"]
    wait_until(lambda: ffn.probe("readinessProbe"), 120, "the FFN pod is ready")
    wait_until(lambda: answers(f"{url}/health"), 200, "the gateway is ready")
    for pod in (attention, ffn):
        assert all(pod.probe(f"{name}Probe") for name in ("startup", "readiness", "liveness"))
    stream = Stream(url, tokens_of("pods", 20), 12).start().join(60)
    assert stream.error is None and len(stream.tokens) == 12
