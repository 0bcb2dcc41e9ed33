"""Rungs 3 and 5 for AITER, run manually: its FlyDSL MoE kernels on our emulator.

    python vendor_kernels.py CHECKOUT [HIDDEN WIDTH]

It needs a C compiler and everything that host_dispatch.py needs for mxfp4. FlyDSL compiles AITER's
two kernels for gfx950, stand_in_hip.c passes their launches to the emulator, and the results are
compared with a float32 computation on the same quantised inputs. The last line of the output is a
negative control: its cosine must be low.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from emulator import Kernel, Memory
from host_dispatch import pretend

HERE = Path(__file__).parent
ROWS, EXPERTS, TOP_K, BLOCK = 8, 4, 2, 32
LDS = 160 * 1024
_LAUNCH = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.POINTER(ctypes.c_uint),
    ctypes.POINTER(ctypes.c_void_p),
)


class HostMemory(Memory):
    """The memory of this process, without bounds checks: FlyDSL passes plain pointers."""

    def __init__(self) -> None:
        super().__init__(1 << 12)

    def put(self, array: np.ndarray) -> int:
        self._kept = np.ascontiguousarray(array).copy()
        return self._kept.ctypes.data

    def load(self, addresses: np.ndarray, nbytes: int) -> np.ndarray:
        parts = [np.frombuffer(ctypes.string_at(int(a), nbytes), np.uint8) for a in addresses]
        return np.array(parts, np.uint8).reshape(len(parts), nbytes)

    def store(self, addresses: np.ndarray, data: np.ndarray) -> None:
        for address, row in zip(addresses, data, strict=True):
            ctypes.memmove(int(address), row.tobytes(), data.shape[1])


class Launcher:
    """Runs every launch on the emulator; keeps the first error, because C cannot propagate it."""

    def __init__(self, scratch: Path) -> None:
        library, versions = scratch / "libamdhip64.so.7", scratch / "versions"
        versions.write_text("hip_4.2 { global: *; };")
        build = ["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(HERE / "stand_in_hip.c")]
        linker = f"-Wl,-soname,{library.name},--version-script={versions}"
        subprocess.run([*build, linker], check=True)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        self._callback = _LAUNCH(self._launch)
        self._library.stand_in_set_launch(self._callback)
        self._kernels: dict[tuple[int, bytes], Kernel] = {}
        self.error: Exception | None = None

    def _launch(self, code, name, sizes, arguments) -> None:
        try:
            self._run(code, name, list(sizes[:7]), arguments)
        except Exception as error:  # raised again by check()
            self.error = self.error or error

    def _run(self, code: int, name: bytes, sizes: list[int], arguments) -> None:
        if (code, name) not in self._kernels:
            header = ctypes.string_at(code, 64)
            sections_at = int.from_bytes(header[40:48], "little")
            size, count = (int.from_bytes(header[i : i + 2], "little") for i in (58, 60))
            image = ctypes.string_at(code, sections_at + size * count)
            self._kernels[code, name] = Kernel(image, name.decode(), "gfx950", LDS)
        kernel = self._kernels[code, name]
        kinds = {8: ("q", ctypes.c_uint64), 4: ("i", ctypes.c_int32)}
        given = []
        for i, size in enumerate(kernel.argument_sizes):
            kind, dtype = kinds[size]
            given.append((kind, ctypes.cast(arguments[i], ctypes.POINTER(dtype))[0]))
        kernel.run(HostMemory(), given, sizes[:3], sizes[3] * sizes[4] * sizes[5] // 64)

    def check(self) -> None:
        if self.error:
            raise self.error


def cosine(got, want) -> float:
    import torch

    return float(torch.nn.functional.cosine_similarity(got.float().flatten(), want.flatten(), 0))


def run(hidden: int, width: int, launcher: Launcher) -> None:
    """Runs both stages on weights of AiterBackend and prints cosines with float32 results."""
    import torch
    import torch.nn.functional as F
    from aiter.ops.flydsl.moe_kernels import flydsl_moe_stage1, flydsl_moe_stage2
    from aiter.ops.shuffle import shuffle_scale

    from afd.wire.codecs_torch import dequantise_mxfp4, quantise_mxfp4
    from afd.wire.layout import Tag
    from ffn_worker.moe.aiter import AiterBackend
    from ffn_worker.moe.quantise import dequantise_weight, quantise_weight
    from ffn_worker.moe.sorting import sort_pairs

    torch.manual_seed(0)
    w13 = (torch.randn(EXPERTS, 2 * width, hidden) / 10).bfloat16()
    w2 = (torch.randn(EXPERTS, hidden, width) / 10).bfloat16()
    quantised = [quantise_weight(w, Tag.E2M1) for w in (w13, w2)]
    backend = AiterBackend((0, EXPERTS), EXPERTS, arch="gfx950")
    backend.prepare(0, *quantised)
    layer = backend._layers[0]
    w13, w2 = (dequantise_weight(w) for w in quantised)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(ROWS)]).int()
    weights = torch.rand(ROWS, TOP_K)

    order = sort_pairs(ids, 0, EXPERTS, BLOCK)
    used = int(order.used)
    pair = order.pairs[:used].long()
    real = pair < ROWS * TOP_K
    row, slot = torch.where(real, pair // TOP_K, ROWS), torch.where(real, pair % TOP_K, TOP_K)
    common = {
        "sorted_token_ids": (slot << 24 | row).int(),
        "sorted_expert_ids": order.experts[: used // BLOCK].contiguous(),
        "num_valid_ids": torch.tensor([used, ROWS], dtype=torch.int32),
        "topk": TOP_K,
        "tile_m": BLOCK,
        "tile_n": 128,
        "tile_k": 256,
        "a_dtype": "fp4",
        "b_dtype": "fp4",
        "out_dtype": "bf16",
    }

    def sorted_scales(scales: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        picked = torch.zeros((used, scales.shape[1]), dtype=torch.uint8)
        picked[real] = scales[index[real]]
        return shuffle_scale(picked)

    def packed(weight: torch.Tensor) -> torch.Tensor:
        return weight.view(torch.uint8)

    x, x_scales = quantise_mxfp4(torch.randn(ROWS, hidden) / 2)
    exact = dequantise_mxfp4(x, x_scales, torch.float32)
    halves = torch.einsum("rh,rknh->rkn", exact, w13[ids.long()])
    act = F.silu(halves[..., :width]) * halves[..., width:]
    got = flydsl_moe_stage1(
        a=x,
        w1=packed(layer.w1),
        w1_scale=packed(layer.w1_scale),
        a1_scale=sorted_scales(x_scales, row),
        sorted_weights=None,
        **common,
    )
    launcher.check()
    got = got[0] if isinstance(got, tuple) else got
    print(f"stage 1, hidden {hidden}, width {width}: cosine {cosine(got, act):.6f}")

    codes, scales = quantise_mxfp4(act.reshape(-1, width))
    exact = dequantise_mxfp4(codes, scales, torch.float32).view(ROWS, TOP_K, width)
    want = torch.einsum("rkw,rkhw,rk->rh", exact, w2[ids.long()], weights)
    pair_weights = torch.where(real, weights.flatten()[pair.clamp(max=ROWS * TOP_K - 1)], 0.0)
    plain = quantise_weight(w2, Tag.E2M1).codes
    for name, weight in (("stage 2", packed(layer.w2)), ("unshuffled stage 2", plain)):
        got = flydsl_moe_stage2(
            inter_states=codes.view(ROWS, TOP_K, -1),
            w2=weight,
            w2_scale=packed(layer.w2_scale),
            a2_scale=sorted_scales(scales, pair),
            sorted_weights=pair_weights,
            mode="atomic",
            **common,
        )
        launcher.check()
        print(f"{name}, hidden {hidden}, width {width}: cosine {cosine(got, want):.6f}")


if __name__ == "__main__":
    source = Path(sys.argv[1]).resolve()
    shape = tuple(map(int, sys.argv[2:4])) or (512, 256)
    with tempfile.TemporaryDirectory() as folder:
        pretend("gfx950", source, Path(folder))
        del os.environ["COMPILE_ONLY"]
        run(*shape, Launcher(Path(folder)))
