"""The scripts for SLURM and dstack name the right hosts: run with stand-ins for the schedulers."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from afd.config.deployment import load_config

DEPLOY = Path(__file__).parents[2] / "deploy"
DEPLOYMENT = """
model: .
attention: {instances: 8, device: cuda}
ffn: {instances: 4, tp: 2, device: cuda}
"""
STAND_INS = {
    "afd": 'printf "%s\\n" "$@" > "$OUT/$AFD_NODE"',
    "scontrol": "printf 'node%d\\n' 0 1",
    "getent": 'echo "10.0.0.${2#node} STREAM $2"',
    # One task per node, as srun starts them.
    "srun": 'shift; for n in 0 1; do SLURMD_NODENAME=node$n AFD_NODE=node$n "$@"; done',
}


@pytest.fixture
def stand_ins(tmp_path: Path) -> dict[str, str]:
    """An environment in which the schedulers' commands write what they would start."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in STAND_INS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (tools / name).chmod(0o755)
    (tmp_path / "deployment.yaml").write_text(DEPLOYMENT)
    (tmp_path / "control.keys").touch()
    return {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "OUT": str(tmp_path)}


def hosts_of(arguments: list[str], folder: Path) -> tuple[str, list[tuple[str, str, int]]]:
    """Loads the deployment as `afd serve` would; returns --host and the hosts of the file."""
    assert arguments[0] == "serve"
    overrides = [arguments[i + 1] for i, word in enumerate(arguments) if word == "--set"]
    deployment = load_config(folder / "deployment.yaml", overrides)
    named = [(h.name, h.address, h.accelerators.count) for h in deployment.hosts if h.accelerators]
    assert [place.attention for place in deployment.places()] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    return arguments[arguments.index("--host") + 1], named


def test_slurm(stand_ins: dict[str, str], tmp_path: Path) -> None:
    script = DEPLOY / "slurm" / "afd.sbatch"
    files = [str(tmp_path / "deployment.yaml"), str(tmp_path / "control.keys")]
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_GPUS_ON_NODE": "8"}
    done = subprocess.run(
        ["bash", str(script), *files],
        env={**stand_ins, **slurm}, capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for node in ("node0", "node1"):
        host, hosts = hosts_of((tmp_path / node).read_text().splitlines(), tmp_path)
        assert host == node
        assert hosts == [("node0", "10.0.0.0", 8), ("node1", "10.0.0.1", 8)]


def test_dstack(stand_ins: dict[str, str], tmp_path: Path) -> None:
    task = yaml.safe_load((DEPLOY / "dstack" / "afd.dstack.yml").read_text())
    given = {
        "DEPLOYMENT": str(tmp_path / "deployment.yaml"),
        "KEYS": str(tmp_path / "control.keys"),
        "DSTACK_NODES_IPS": "10.0.0.7\n10.0.0.8",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_NODE_RANK": "1",
        "AFD_NODE": "out",
    }
    (script,) = task["commands"]
    done = subprocess.run(
        ["sh", "-c", script],
        env={**stand_ins, **given}, capture_output=True, text=True, check=False, timeout=20,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    host, hosts = hosts_of((tmp_path / "out").read_text().splitlines(), tmp_path)
    assert host == "node1"
    assert hosts == [("node0", "10.0.0.7", 8), ("node1", "10.0.0.8", 8)]
