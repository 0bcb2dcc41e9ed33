"""Device rocm on the stand-in node: slots in hip:N, links, captured and replayed steps.

Every case runs in processes whose libamdhip64 is hip.cc. The FFN instance is the product's process;
the attention side is a stub without vLLM (tests/gpu/gpu_pair.py), the same that runs on real GPUs.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import node
import pytest

from afd_bench import stand_in_nic

pytest.importorskip("torch")

HERE = Path(__file__).parent
REFUSALS = json.loads((HERE / "refusals.json").read_text())["refusals"]


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    built = node.build(tmp_path_factory.mktemp("hip"))
    if built is None:
        pytest.skip("g++, which compiles the stand-in node, is not installed")
    return built


def run(library, script, *words, torch=True, **more):
    environment = {**os.environ, **node.variables(library, torch=torch), **more}
    command = [sys.executable, str(HERE / script), *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="session")
def nic(tmp_path_factory):
    """The libibverbs without hardware."""
    return str(stand_in_nic.build(tmp_path_factory.mktemp("verbs")))


LONG = [pytest.param(name, marks=pytest.mark.long) for name in ("formats", "mixed", "tcp")]
CASES = ("steps", "verbs", *LONG)


@pytest.mark.parametrize("case", CASES)
def test_a_pair_on_the_node(case, library, nic, tiny_models, tmp_path):
    words = (case, tiny_models("qwen3_moe"), tmp_path)
    done = run(library, "pair_cases.py", *words, FAKE_IBVERBS=nic)
    log = tmp_path / "ffn.log"
    print(log.read_text(errors="replace")[-3000:] if log.exists() else "the FFN wrote no log")
    assert done.returncode == 0, done.stderr


def doctor(library, *words):
    environment = {**os.environ, **node.variables(library)}
    command = [sys.executable, "-m", "afd_launch.cli", "doctor", "--active", "--device", "rocm"]
    done = subprocess.run(
        [*command, *words], env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_doctor_moves_bytes_through_gpu_memory_of_another_process(library):
    (slots,) = doctor(library, "--only", "slots")
    assert slots.startswith("ok    slots on rocm      ipc: 1 MiB there and back, bytes equal")


@pytest.mark.long
def test_doctor_runs_rounds_of_the_copy_engine(library):
    words = ("--only", "copy", "--expect", "copy_gbytes=0", "doorbell_us=1e6")
    copies, doorbell = doctor(library, *words)
    assert copies.startswith("ok    copy engine") and "16 MiB" in copies
    assert doorbell.startswith("ok    doorbell") and "round trip" in doorbell


@pytest.fixture(scope="session")
def refused(library):
    done = run(library, "refusal_cases.py", torch=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("entry", REFUSALS, ids=lambda entry: entry["case"])
def test_what_hip_refuses_is_refused_here_too(entry, refused):
    """Negative controls: each call and error is recorded with its place in HIP's source."""
    assert entry["source"].partition(":")[0] in ("clr", "systems")
    assert refused[entry["case"]] == entry["error"]


def test_every_refusal_is_recorded(refused):
    assert set(refused) == {entry["case"] for entry in REFUSALS}
