"""The all-reduce on 2 and 4 GPUs: equal to the reference bit for bit, graphs, lost ranks."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="triton is not installed")

GPUS = torch.cuda.device_count()
RANK = Path(__file__).with_name("allreduce_rank.py")
pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
WORLDS = [
    pytest.param(n, marks=pytest.mark.skipif(n > GPUS, reason=f"needs {n} NVIDIA GPUs"))
    for n in (2, 4)
]


CHECKS = ["one_shot", "library", "graph", "lost", "stopped", "exact"]
CHECKS += ["fp16", "int8", "int6", "int4", "fp4"]


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce(world: int, check: str, tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, str(RANK), check, str(r), str(world), str(tmp_path)])
        for r in range(world)
    ]
    waited = ranks[:-1] if check == "stopped" else ranks
    end = time.monotonic() + 240
    try:
        codes = [rank.wait(timeout=max(1, end - time.monotonic())) for rank in waited]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * len(waited)
