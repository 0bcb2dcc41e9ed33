"""Backend on DeepGEMM's grouped FP8 products, for NVIDIA Hopper.

The library comes with vLLM 0.26 (vllm.third_party.deep_gemm, version 2.5.0; source
github.com/deepseek-ai/DeepGEMM) and compiles its kernels when they are first called. Its operands
are this project's as they are: e4m3fn rows with one float32 scale per 128 columns, e4m3fn weights
with one per 128 x 128. Around its two products stand kernels of ours (kernels/placed.py).

Of its layouts for grouped rows the one with sums on the device is taken (``use_psum_layout``): rows
in one block of memory, each expert's padded to the kernel's tile, and ``ends``, where each
expert's end. The scheduler (include/deep_gemm/scheduler/gemm.cuh) walks the tiles that ``ends``
tell of and no others, so that a graph is captured for the most rows there can be and pays for those
there are. The layout with an expert per row loads every tile of the upper bound, though it
computes no tile of -1: on a shard of half of the experts, twice the rows. The masked one needs
room for every row at every expert.
"""

import importlib.util
import math
import os
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from afd.errors import ConfigError
from afd.wire.codecs import FP8_MAX
from afd.wire.layout import SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe.crossover import least_pairs, mean_pairs
from ffn_worker.moe.quantise import Scheme, Weight
from ffn_worker.moe.sorting import PlacedPairs, capacity, place_pairs_on_gpu
from ffn_worker.moe.triton import Layer, TritonBackend

_FOLDER = Path("third_party/deep_gemm")


def tile_rows(mean: float) -> int:
    """Rows of a tile at ``mean`` pairs per expert.

    64 is the least that Hopper multiplies. In a tile of 128 a half without rows is loaded and
    stored, but not computed.
    """
    return 64 if mean <= 64 else 128


def expected_rows(experts: int, mean: float, shared: int, tile: int) -> int:
    """Rows per group that the library is told to choose its other tile size for.

    It rounds them up to whole tiles and takes that times the groups for the number of tiles. An
    expert's last tile is half full on average. Powers of two, because every choice is a kernel
    that compiles for seconds when a batch first needs it.

    Args:
        mean: pairs per expert. shared: rows of a shared expert, a group more; 0: there is none.
    """
    tiles = experts * (mean / tile + 0.5) + -(-shared // tile)
    return tile * 2 ** max(0, round(math.log2(tiles / (experts + (shared > 0)))))


@cache
def library() -> ModuleType:
    """DeepGEMM, once.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        from vllm.third_party import deep_gemm
    except (ImportError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"DeepGEMM cannot be imported ({error}); use ffn.backend: triton"
        ) from error
    # Its kernels then begin while the one before ends, as under vLLM on Hopper.
    deep_gemm.set_pdl(True)
    return deep_gemm


def _compiler() -> Path:
    """nvcc, where DeepGEMM looks for it."""
    if named := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return Path(named)
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(home) / "bin/nvcc"
    return Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class _Operand:
    """FP8 rows [room, k] with their scales as the library's TMA loads want them, [k / 128, room];
    ``room`` is a multiple of 4."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, room: int, k: int, device: torch.device) -> "_Operand":
        return cls(
            torch.empty((room, k), dtype=torch.float8_e4m3fn, device=device),
            torch.empty((k // SCALE_BLOCK, room), dtype=torch.float32, device=device),
        )


def _product(
    a: _Operand, weight: Weight, placed: PlacedPairs, tile: int, expected: int
) -> torch.Tensor:
    """bfloat16 [room, N] = a x weight[expert].T for the rows in use; the others are undefined."""
    out = torch.empty(
        (a.codes.shape[0], weight.shape[1]), dtype=torch.bfloat16, device=a.codes.device
    )
    deep_gemm = library()
    # The height of its tiles is a setting of the process; whoever else uses it sets it too.
    deep_gemm.set_mk_alignment_for_contiguous_layout(tile)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        (a.codes, a.scales.t()),
        (weight.codes, weight.scales),
        out,
        placed.ends,
        use_psum_layout=True,
        expected_m_for_psum_layout=expected,
    )
    return out


class DeepGemmBackend(TritonBackend):
    """FP8_BLOCK experts [start, end). FP8 rows are multiplied as they are, others quantised first;
    the shared expert is one expert more where it is no wider than a routed one, computed in the
    routed ones' width."""

    schemes = (Scheme.FP8_BLOCK,)

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        library()

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        reason = TritonBackend.unavailable(dtype, hidden, intermediate)
        if reason is not None:
            return reason
        if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
            return "its FP8 kernels with float32 scales are for NVIDIA Hopper (sm_90)"
        if dtype is not torch.bfloat16:
            return f"it computes in bfloat16, not {dtype}"
        if hidden % SCALE_BLOCK or intermediate % SCALE_BLOCK:
            return f"sizes must be multiples of {SCALE_BLOCK}, not {hidden} and {intermediate}"
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return "the package vllm, which brings DeepGEMM, is not installed"
        folder = Path(spec.origin).parent / _FOLDER
        if not (folder / "include/deep_gemm").is_dir():
            return f"{folder} holds no DeepGEMM with its headers; install vllm again"
        if os.environ.get("DG_JIT_USE_NVRTC", "0") == "0" and not _compiler().is_file():
            return (
                f"DeepGEMM finds no compiler at {_compiler()}; set CUDA_HOME to a CUDA toolkit, or "
                "DG_JIT_USE_NVRTC=1"
            )
        return None

    def forward_encoded(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        held = self._layers[layer]
        if len(rows) == 0:
            return torch.empty((0, held.shape.hidden), dtype=dtype, device=rows.device)
        if rows.tag != Tag.E4M3FN:
            rows = EncodedRows.of(rows.decode(dtype), Tag.E4M3FN)
        return self._products(held, rows, topk_ids, topk_weights)

    def _products(
        self,
        held: Layer,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Both products of FP8 rows: [rows, hidden] bfloat16."""
        from ffn_worker.kernels.placed import (
            gather_rows_kernel,
            silu_quantise_kernel,
            sum_slots_kernel,
        )

        assert rows.scales is not None
        count, top_k = topk_ids.shape
        hidden, width, shared = held.shape.hidden, held.shape.width, bool(held.shape.shared)
        mean = mean_pairs(count, top_k, self.num_experts)
        tile = tile_rows(mean)
        placed = place_pairs_on_gpu(topk_ids, self.start, self.end, tile, shared=shared)
        slots, each = placed.slots, top_k + shared
        experts = self.end - self.start
        room = capacity(count * each, experts + shared, tile)
        expected = expected_rows(experts, mean, count if shared else 0, tile)
        a = _Operand.empty(room, hidden, rows.device)
        gather_rows_kernel[(count,)](
            rows.payload.view(torch.uint8),
            rows.scales,
            slots,
            a.codes.view(torch.uint8),
            a.scales,
            hidden,
            room,
            EACH=each,
            BLOCK=1 << (hidden - 1).bit_length(),
        )
        h = _product(a, held.w13, placed, tile, expected)
        a, groups = _Operand.empty(room, width, rows.device), 8
        silu_quantise_kernel[(count * each, -(-width // (SCALE_BLOCK * groups)))](
            h,
            slots,
            a.codes,
            a.scales,
            width,
            room,
            FP8_MAX=FP8_MAX[Tag.E4M3FN],
            GROUPS=groups,
        )
        y = _product(a, held.w2, placed, tile, expected)
        out = torch.empty((count, hidden), dtype=y.dtype, device=y.device)
        block = 1024
        sum_slots_kernel[(count, -(-hidden // block))](
            y, slots, topk_weights, out, hidden, TOP_K=top_k, SHARED=shared, BLOCK=block
        )
        return out


class HopperBackend(DeepGemmBackend):
    """DeepGEMM where an expert has enough pairs on average, the Triton kernels on the same weights
    where it has fewer (:mod:`ffn_worker.moe.crossover`)."""

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        super().prepare(layer, w13, w2)
        self._least = least_pairs(torch.cuda.get_device_name(w13.codes.device))

    def forward_encoded(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        many = mean_pairs(*topk_ids.shape, self.num_experts) >= self._least
        backend = DeepGemmBackend if many else TritonBackend
        return backend.forward_encoded(self, layer, rows, topk_ids, topk_weights, dtype)
