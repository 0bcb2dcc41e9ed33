"""Rung 4, run manually: our AITER backend on the real AITER's host code, without a GPU.

    python host_dispatch.py CHECKOUT ARCH [plain|fp8_block|mxfp4 ...]

CHECKOUT is a checkout of AITER (signatures.json names the commit); ARCH is gfx942 or gfx950. The
script needs torch, the packages of the extra ``amd``, ``flydsl==0.3.1``, pandas, einops and jinja2.
For mxfp4, FlyDSL compiles kernels and also needs ROCM_PATH with llvm/bin/ld.lld. Every shape runs
twice under FakeTensorMode: as the registered operator (schema, result shape) and as AITER's own
implementation (table look-up, shape checks, kernel selection). Native operators do nothing.
"""

import enum
import importlib
import os
import re
import sys
import tempfile
import time
import types
from pathlib import Path

CU_COUNT = {"gfx942": 304, "gfx950": 256}
SHAPES = {  # hidden, width per expert and experts on this rank, experts of the model, top_k
    "Qwen3-30B-A3B EP4": (2048, 768, 32, 128, 8),
    "Qwen3-235B-A22B EP8": (4096, 1536, 16, 128, 8),
    "DeepSeek-V3 EP8": (7168, 2048, 32, 256, 8),
    "DeepSeek-V3 TP8": (7168, 256, 256, 256, 8),
    "Step-3 EP2 TP8": (7168, 640, 24, 48, 3),
    "Step-3 EP8": (7168, 5120, 6, 48, 3),
}


def native_enums(checkout: Path) -> types.ModuleType:
    """Returns a fake of AITER's compiled module of enumerations, built from its C++ header."""
    header = (checkout / "csrc/include/aiter_enum.h").read_text()
    module = types.ModuleType("module_aiter_core")
    for name in ("ActivationType", "QuantType", "MlaVersion"):
        body = re.search(rf"enum class {name} : int\s*\{{(.*?)\}}", header, re.S)[1]
        members, value = {}, -1
        for member, given in re.findall(r"(\w+)\s*(?:=\s*(-?\d+))?\s*,", body):
            value = int(given) if given else value + 1
            members[member] = value
        members_type = enum.IntEnum(name, members)
        members_type.__doc__ = "Members:" + ",".join(members)  # AITER parses it
        setattr(module, name, members_type)
    return module


def pretend(arch: str, checkout: Path, folder: Path) -> None:
    """Sets the environment and modules so that `import aiter` finds a GPU of ``arch``."""
    rocminfo = folder / "rocm/bin/rocminfo"
    rocminfo.parent.mkdir(parents=True)
    rocminfo.write_text(f"#!/bin/sh\necho '  Name: {arch}'\n")
    rocminfo.chmod(0o755)
    version = folder / "rocm/.info/version"
    version.parent.mkdir()
    version.write_text("6.4.0\n")
    os.environ["PATH"] = f"{rocminfo.parent}:{os.environ['PATH']}"
    os.environ.setdefault("ROCM_PATH", str(folder / "rocm"))
    os.environ["ROCM_HOME"] = os.environ["ROCM_PATH"]
    os.environ.update(
        GPU_ARCHS=arch,
        CU_NUM=str(CU_COUNT[arch]),
        FLYDSL_GPU_ARCH=arch,
        COMPILE_ONLY="1",
        AITER_JIT_DIR=str(folder),
        HOME=str(folder),
    )
    (folder / "module_aiter_core.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom host_dispatch import native_enums\n"
        f"globals().update(vars(native_enums(Path({str(checkout)!r}))))\n"
    )
    sys.path[:0] = [str(checkout), str(folder)]

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("hip", arch, 64)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, _: object = None) -> int:
            return 0

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cuda", 0)

    properties = types.SimpleNamespace(
        gcnArchName=arch,
        multi_processor_count=CU_COUNT[arch],
        shared_memory_per_block=(160 if arch == "gfx950" else 64) * 1024,
        total_memory=288 << 30,
        warp_size=64,
        name=arch,
    )
    stream = types.SimpleNamespace(cuda_stream=0, device=torch.device("cuda", 0))
    driver.set_active(Driver())
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.current_device = lambda: 0
    torch.cuda.current_stream = lambda *_: stream


def dispatch(arch: str, schemes: list[str]) -> int:
    """Runs every shape and prints one line for each. Returns the number of failures."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from afd.wire.dtypes_torch import DTYPE_OF_TAG
    from afd.wire.layout import Tag
    from afd.wire.rows_torch import EncodedRows
    from ffn_worker.moe.aiter import FP8_OF_ARCH, AiterBackend
    from ffn_worker.moe.quantise import Weight, in_scheme
    from ffn_worker.moe.scheme import Scheme

    module = importlib.import_module("aiter.fused_moe")
    importlib.import_module("aiter").moe_sorting_opus_get_workspace_size = lambda *_: 1024
    operator, failures = module.fused_moe, 0

    def implementation(x, w1, w2, weights, ids, **given):
        given |= {n: int(given[n]) for n in ("activation", "quant_type")}
        return module._fused_moe_impl(x, w1, w2, weights, ids, **given)

    def rows_of(scheme: Scheme, count: int, hidden: int) -> list[tuple]:
        def fake(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="cuda")

        wire = {
            Scheme.FP8_BLOCK: (FP8_OF_ARCH[arch], 1, torch.float32, 128),
            Scheme.MXFP4: (Tag.E2M1, 2, torch.uint8, 32),
        }
        out = [("bfloat16 rows", EncodedRows.of(fake(count, hidden)))]
        if scheme in wire:
            tag, packing, scale, block = wire[scheme]
            codes = fake(count, hidden // packing, dtype=DTYPE_OF_TAG[tag])
            scales = fake(count, hidden // block, dtype=scale)
            out.append(("wire rows", EncodedRows(tag, codes, scales)))
        return out

    for scheme in map(Scheme, schemes):
        for name, (hidden, width, here, experts, top_k) in SHAPES.items():
            with FakeTensorMode(allow_non_fake_inputs=True):
                backend = AiterBackend((0, here), experts, arch=arch)
                shapes = (here, 2 * width, hidden), (here, hidden, width)
                plain = [torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in shapes]
                weights = [Weight.of(weight) for weight in plain]
                backend.prepare(
                    0, *(in_scheme(w, scheme, backend.fp8, torch.bfloat16) for w in weights)
                )
                for count in (64, 2048):
                    ids = torch.empty((count, top_k), dtype=torch.int32, device="cuda")
                    real = torch.empty(1, dtype=torch.int32, device="cuda")
                    for kind, rows in rows_of(scheme, count, hidden):
                        for level, function in (("A", operator), ("B", implementation)):
                            module.fused_moe = function
                            line = f"{level} {arch} {scheme.value} {name}, {count} {kind}"
                            start = time.monotonic()
                            try:
                                y = backend.forward_encoded(
                                    0, rows, ids, ids.float(), torch.bfloat16, real=real
                                )
                                assert y.shape == (count, hidden) and y.dtype == torch.bfloat16
                                print(f"ok   {line} {time.monotonic() - start:.1f} s", flush=True)
                            except Exception as error:  # any error of AITER is a failure
                                failures += 1
                                print(f"FAIL {line}: {type(error).__name__}: {error}", flush=True)
    return failures


if __name__ == "__main__":
    source, target = Path(sys.argv[1]).resolve(), sys.argv[2]
    wanted = sys.argv[3:] or ["plain", "fp8_block"] + ["mxfp4"] * (target == "gfx950")
    with tempfile.TemporaryDirectory() as scratch:
        pretend(target, source, Path(scratch))
        sys.exit(dispatch(target, wanted) > 0)
