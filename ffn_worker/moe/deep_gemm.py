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

A shared expert is no group: groups have one width. Its first product runs on a stream of its own
beside sorting and gathering, of which it needs nothing, its second in the kernel that sums results.
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
from ffn_worker.load import SlotLoad
from ffn_worker.moe.crossover import least_pairs, mean_pairs
from ffn_worker.moe.quantise import Scheme, Weight, in_scheme, widened
from ffn_worker.moe.side_stream import SideStream
from ffn_worker.moe.sorting import PlacedPairs, capacity, place_pairs_on_gpu
from ffn_worker.moe.triton import TritonBackend

_FOLDER = Path("third_party/deep_gemm")


def tile_rows(mean: float) -> int:
    """Rows of a tile at ``mean`` pairs per expert.

    64 is the least that Hopper multiplies. In a tile of 128 a half without rows is loaded and
    stored, but not computed.
    """
    return 64 if mean <= 64 else 128


def expected_rows(mean: float, tile: int) -> int:
    """Rows per group that the library is told to choose its other tile size for.

    It rounds them up to whole tiles and takes that times the groups for the number of tiles. An
    expert's last tile is half full on average. Powers of two, because every choice is a kernel
    that compiles for seconds when a batch first needs it.

    Args:
        mean: pairs per expert.
    """
    return tile * 2 ** max(0, round(math.log2(mean / tile + 0.5)))


def beside(sms: int) -> int:
    """Of the device's multiprocessors, how many compute the shared expert's first product while the
    others sort and gather: half of them, and an even number, as the library wants it."""
    return max(2, sms // 4 * 2)


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
    """FP8 rows [room, k] with their scales as the library's TMA loads want them, [k / 128, room],
    if ``room`` is a multiple of 4."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def empty(cls, room: int, k: int, device: torch.device) -> "_Operand":
        return cls(
            torch.empty((room, k), dtype=torch.float8_e4m3fn, device=device),
            torch.empty((k // SCALE_BLOCK, room), dtype=torch.float32, device=device),
        )


def _grouped_product(
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


def _product(rows: EncodedRows, weight: Weight, out: torch.Tensor) -> None:
    """out bfloat16 [rows, N] = rows x weight.T, weight [N, K], on a part of the device."""
    deep_gemm = library()
    every = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(beside(every))
    try:
        deep_gemm.fp8_gemm_nt((rows.payload, rows.scales), (weight.codes, weight.scales), out)
    finally:
        deep_gemm.set_num_sms(every)


def _sum(y: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """out [rows, hidden]: each row's results by their slots, weighed and added."""
    from ffn_worker.kernels.placed import sum_slots_kernel

    (count, hidden), block = out.shape, 1024
    sum_slots_kernel[(count, -(-hidden // block))](
        y, slots, weights, out, hidden, TOP_K=weights.shape[1], BLOCK=block
    )


def _sum_shared(
    y: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    s: _Operand,
    down: Weight,
    out: torch.Tensor,
) -> None:
    """:func:`_sum`, and the shared expert's second product, of s."""
    from ffn_worker.kernels.placed import sum_slots_shared_kernel

    count, hidden = out.shape
    m, n = 64, SCALE_BLOCK
    sum_slots_shared_kernel[(-(-count // m) * (hidden // n),)](
        y,
        slots,
        weights,
        s.codes,
        s.scales,
        down.codes,
        down.scales,
        out,
        count,
        hidden,
        down.shape[1],
        TOP_K=weights.shape[1],
        BM=m,
        BN=n,
        num_warps=4,
        num_stages=3,
    )


@dataclass(frozen=True)
class _Shared:
    """A shared expert, its width rounded up to whole scales. gate_up: [2 * width, hidden]. down:
    [hidden, width]."""

    gate_up: Weight
    down: Weight


def _silu_quantised(h: torch.Tensor, slots: torch.Tensor | None, pairs: int) -> _Operand:
    """silu(gate) * up of h [room, 2 * width] in FP8, for the slots of ``pairs`` pairs; slots None:
    for every row."""
    from ffn_worker.kernels.placed import silu_quantise_kernel

    room, width = h.shape[0], h.shape[1] // 2
    a, groups = _Operand.empty(room, width, h.device), 8
    silu_quantise_kernel[(pairs, -(-width // (SCALE_BLOCK * groups)))](
        h,
        h if slots is None else slots,
        a.codes,
        a.scales,
        width,
        room,
        PLACED=slots is not None,
        FP8_MAX=FP8_MAX[Tag.E4M3FN],
        GROUPS=groups,
    )
    return a


class DeepGemmBackend(TritonBackend):
    """FP8_BLOCK experts [start, end) and a shared expert of any width. FP8 rows are multiplied as
    they are, others quantised first."""

    schemes = (Scheme.FP8_BLOCK,)

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._beside: dict[int, _Shared] = {}
        self._side: SideStream | None = None
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

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        width = -(-down.shape[-1] // SCALE_BLOCK) * SCALE_BLOCK
        self._beside[layer] = _Shared(
            *(
                in_scheme(weight, Scheme.FP8_BLOCK, self.fp8, torch.bfloat16)
                for weight in widened(gate_up, down, width)
            )
        )
        if self._side is None:
            self._side = SideStream(gate_up.codes.device)
        return True

    def release(self, layer: int) -> None:
        super().release(layer)
        self._beside.pop(layer, None)

    def _compute(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        load: SlotLoad | None,
    ) -> None:
        shared = self._beside.get(layer)
        if shared is None:
            y, placed = self._routed(layer, rows, topk_ids, load)
            _sum(y, placed.slots, topk_weights, out)
            return
        assert self._side is not None and rows.scales is not None  # set by prepare_shared; FP8
        h = torch.empty(
            (len(rows), shared.gate_up.shape[0]), dtype=torch.bfloat16, device=rows.device
        )
        with self._side.branch():
            _product(rows, shared.gate_up, h)
            s = _silu_quantised(h, None, len(rows))
        y, placed = self._routed(layer, rows, topk_ids, load)
        self._side.join()
        _sum_shared(y, placed.slots, topk_weights, s, shared.down, out)

    def _routed(
        self, layer: int, rows: EncodedRows, topk_ids: torch.Tensor, load: SlotLoad | None
    ) -> tuple[torch.Tensor, PlacedPairs]:
        """Both products of the routed experts: bfloat16 [room, hidden], by slots."""
        from ffn_worker.kernels.placed import gather_rows_kernel

        held, experts = self._layers[layer], self.end - self.start
        count, top_k = topk_ids.shape
        hidden = held.shape.hidden
        mean = mean_pairs(count, top_k, self.num_experts)
        tile = tile_rows(mean)
        counts = None if load is None else load.counts
        placed = place_pairs_on_gpu(topk_ids, self.start, self.end, tile, counts)
        room = capacity(count * top_k, experts, tile)
        expected = expected_rows(mean, tile)
        a = _Operand.empty(room, hidden, rows.device)
        gather_rows_kernel[(count,)](
            rows.payload.view(torch.uint8),
            rows.scales,
            placed.slots,
            a.codes.view(torch.uint8),
            a.scales,
            hidden,
            room,
            EACH=top_k,
            BLOCK=1 << (hidden - 1).bit_length(),
        )
        h = _grouped_product(a, held.w13[:experts], placed, tile, expected)
        a = _silu_quantised(h, placed.slots, count * top_k)
        return _grouped_product(a, held.w2[:experts], placed, tile, expected), placed


class HopperBackend(DeepGemmBackend):
    """DeepGEMM where an expert has enough pairs on average, the Triton kernels on the same weights
    where it has fewer (:mod:`ffn_worker.moe.crossover`). A shared expert, which is small, is held
    for both."""

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        super().prepare(layer, w13, w2)
        self._least = least_pairs(torch.cuda.get_device_name(w13.codes.device))

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        joined = TritonBackend.prepare_shared(self, layer, gate_up, down)
        return joined and super().prepare_shared(layer, gate_up, down)

    def _compute(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        load: SlotLoad | None,
    ) -> None:
        many = mean_pairs(*topk_ids.shape, self.num_experts) >= self._least
        backend = DeepGemmBackend if many else TritonBackend
        backend._compute(self, layer, rows, topk_ids, topk_weights, out, load)
