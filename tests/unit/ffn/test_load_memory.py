"""Host memory while experts load: at most one layer of the shard beyond what is kept.

``./run test -m long tests/unit/ffn/test_load_memory.py`` does the same with a checkpoint of 4 GiB.
"""

import resource
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from afd_bench.load_torch import write

SMALL = {"layers": 4, "experts": 8, "hidden": 1024, "width": 1536}  # 75 MB of 302 MB a layer
LARGE = {"layers": 8, "experts": 16, "hidden": 2048, "width": 2816}  # 554 MB of 4.4 GB

LOAD = """
import gc, resource, sys
import torch
from afd.models import read_model
from afd_bench.load_torch import resident
from ffn_worker.experts.build import load_ffn_model

folder, layer, whole = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
family, model = read_model(folder)

def load(most=None, device="meta", tp=1):
    gc.collect()
    limit = resource.RLIM_INFINITY if most is None else resident("VmData") + most
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
load()  # what the libraries allocate at their first use does not count
overhead = 32 << 20  # two stacks of threads, which count as data, and the allocator
print(load(layer), load(layer // 2 + overhead, tp=2))
print(load(whole + layer, "cpu"), load(layer + overhead, "cpu"))
"""


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_DATA)[1] != -1, reason="a limit is set")
@pytest.mark.parametrize("shape", [SMALL, pytest.param(LARGE, marks=pytest.mark.long)])
def test_host_memory_is_one_layer_at_most(tmp_path, shape):
    """RLIMIT_DATA allows one layer of the shard beyond what the process has after its imports."""
    write({"folder": str(tmp_path), **shape})
    layer = 2 * 3 * shape["experts"] * shape["hidden"] * shape["width"]
    whole = shape["layers"] * layer
    command = [sys.executable, "-c", LOAD, str(tmp_path), str(layer), str(whole)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    for file in tmp_path.iterdir():
        file.unlink()  # pytest keeps the folder
    assert done.returncode == 0, done.stderr[-2000:]
    device, half, host, failed = done.stdout.split()
    assert (int(device), int(half), int(host)) == (whole, whole // 2, whole)
    assert failed in ("MemoryError", "RuntimeError")  # the limit holds: kept weights do not fit
