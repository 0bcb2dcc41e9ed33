"""Host memory while experts load: at most one layer of the shard beyond what is kept."""

import resource
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from afd_bench.load_torch import write

SHAPE = {"layers": 4, "experts": 8, "hidden": 1024, "width": 1536}
LAYER = 2 * 3 * SHAPE["experts"] * SHAPE["hidden"] * SHAPE["width"]  # 75 MB, of 302 MB

LOAD = """
import gc, resource, sys
import torch
from afd.models import read_model
from afd_bench.load_torch import resident
from ffn_worker.experts.build import load_ffn_model

folder, layer = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
family, model = read_model(folder)

def load(most, device="meta", tp=1):
    gc.collect()
    limit = resident("VmData") + most
    resource.setrlimit(resource.RLIMIT_DATA, (limit, resource.RLIM_INFINITY))
    try:
        ffn = load_ffn_model(
            folder, family, model, instances=1, index=0, tp=tp, rank=tp - 1,
            backend="torch", threads=2, device=torch.device(device),
        )
        return ffn.weight_bytes
    except (MemoryError, RuntimeError) as error:
        return type(error).__name__
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)

# "meta" keeps nothing on this host, as a GPU does.
overhead = 32 << 20  # two stacks of threads, which count as data, and the allocator
print(load(layer), load(layer // 2 + overhead, tp=2))
print(load(5 * layer, "cpu"), load(layer + overhead, "cpu"))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("load")
    write({"folder": str(folder), **SHAPE})
    return folder


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_DATA)[1] != -1, reason="a limit is set")
def test_host_memory_is_one_layer_at_most(checkpoint):
    """RLIMIT_DATA allows one layer of the shard beyond what the process has after its imports."""
    command = [sys.executable, "-c", LOAD, str(checkpoint), str(LAYER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    device, half, host, failed = done.stdout.split()
    whole = SHAPE["layers"] * LAYER
    assert (int(device), int(half), int(host)) == (whole, whole // 2, whole)
    assert failed in ("MemoryError", "RuntimeError")  # the limit holds: kept weights do not fit
