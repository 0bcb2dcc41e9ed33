"""The host code of afd_comm for GPUs, against a fake libcuda and libamdhip64.

tests/gpu covers real CUDA. Real HIP is untested: no AMD hardware was available.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import gpu_cases
import gpu_fault_cases
import numpy as np
import pytest
from fake_verbs import built_fake

from afd_comm import USER_BYTES, CommError, Link, Message, Region, Status

HERE = Path(__file__).parent
SOURCES = HERE.parents[2] / "comm" / "src"
CASES = [
    gpu_cases.device_to_device,
    gpu_cases.between_processes,
    gpu_cases.shared_payload,
    gpu_cases.gpu_to_cpu,
    gpu_cases.cpu_to_gpu,
    gpu_cases.post_blocks_until_copied,
    gpu_cases.wedged_peer,
    gpu_cases.replay_with_reset,
    gpu_cases.many_waits_in_one_call,
    gpu_cases.capture,
    gpu_cases.gate,
    gpu_cases.bad_input,
    gpu_fault_cases.stopped_sender,
    gpu_fault_cases.stopped_and_killed_owner,
    gpu_fault_cases.late_message_of_a_dead_epoch,
    gpu_fault_cases.withheld_steps,
    gpu_fault_cases.refused_page_locking,
    gpu_fault_cases.three_peers,
]

RDMA_CASES = [
    "gpu_cases:over_rdma",
    "gpu_proxy_cases:staged_tcp",
    "gpu_proxy_cases:auto_backend",
    "gpu_proxy_cases:line_rate",
    "gpu_proxy_cases:without_bytes",
    "gpu_proxy_cases:direct_verbs",
    "gpu_proxy_cases:relinked",
    "gpu_proxy_cases:staged_verbs",
    "gpu_proxy_cases:to_another_process",
    "gpu_proxy_cases:memory_that_comes_back",
    "gpu_proxy_cases:graphs",
    "gpu_proxy_cases:staged_graphs",
]
"""Cases with the libibverbs without hardware, as file:function."""


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns the folder of the fake driver library by kind (cuda, hip)."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++, which compiles the fake driver, is not installed")
    out, running = {}, []
    for kind, file in gpu_cases.LIBRARY.items():
        out[kind] = tmp_path_factory.mktemp(f"fake_{kind}")
        flags = ["-O0", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-DFAKE_{kind.upper()}"]
        source = [f"-I{SOURCES}", str(HERE / "fake_gpu.cc"), "-o", str(out[kind] / file)]
        running.append(subprocess.Popen([compiler, *flags, *source]))
    for one in running:
        assert one.wait(timeout=120) == 0
    return out


@pytest.mark.parametrize("kind", ["cuda", "hip"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_fake_driver(
    case: Callable[[gpu_cases.Gpu], None], kind: str, drivers: dict[str, Path], tmp_path: Path
) -> None:
    environment = dict(
        os.environ,
        LD_LIBRARY_PATH=str(drivers[kind]),
        FAKE_GPU_LOG=str(tmp_path / "log"),
    )
    (tmp_path / "log").touch()
    command = [sys.executable, str(HERE / f"{case.__module__}.py"), case.__name__, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def ibverbs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with built_fake(tmp_path_factory.mktemp("ibverbs")) as fake:
        yield fake.library


@pytest.mark.parametrize("kind", ["cuda", "hip"])
@pytest.mark.parametrize("case", RDMA_CASES)
def test_rdma_on_fake_driver(
    case: str, kind: str, drivers: dict[str, Path], ibverbs: str, tmp_path: Path
) -> None:
    environment = dict(
        os.environ,
        LD_LIBRARY_PATH=str(drivers[kind]),
        FAKE_GPU_LOG=str(tmp_path / "log"),
        FAKE_IBVERBS=ibverbs,
    )
    (tmp_path / "log").touch()
    file, _, function = case.partition(":")
    command = [sys.executable, str(HERE / f"{file}.py"), function, kind]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_enqueue_on_the_reference_accelerator_equals_post() -> None:
    """Device cpu: every operation is done on return."""
    rng = np.random.default_rng(5)
    regions = [Region(2, 4096, name=name) for name in ("posted", "enqueued")]
    plain = Link(regions[0].addresses, backend="shm", slots=(0, 2), timeout_us=1_000_000)
    ours = Link(regions[1].addresses, backend="ipc", slots=(0, 2), timeout_us=1_000_000)
    regions[1].pin("cpu")
    for seq in range(1, 50):
        slot = int(rng.integers(2))
        data = rng.integers(0, 256, int(rng.integers(1, 4096)), dtype=np.uint8)
        parts = [(4096 - data.nbytes, data.ctypes.data, data.nbytes)]
        message = Message(slot, parts, rng.bytes(USER_BYTES), int(rng.integers(0, 2**32)))
        assert plain.post(message, seq) == ours.enqueue(0, message, seq) == Status.OK
        regions[1].enqueue_wait(0, [slot], [seq])
        assert [r.ready(slot, seq) for r in regions] == [True, True]
        assert np.array_equal(regions[0].buffer(slot), regions[1].buffer(slot))
        texts = [repr(r.header(slot)) for r in regions]
        assert texts[0] == texts[1]


def test_a_missing_driver_is_named() -> None:
    if shutil.which("nvidia-smi") is not None:
        pytest.skip("this host has NVIDIA's driver")
    with pytest.raises(CommError, match=r"libcuda\.so\.1; install NVIDIA's driver"):
        Region(1, 1, name="x", device="cuda:0")
