"""Backend on DeepGEMM's grouped products, FP8 and bfloat16, for NVIDIA Hopper.

The library comes with vLLM 0.26 (vllm.third_party.deep_gemm, version 2.5.0; source
github.com/deepseek-ai/DeepGEMM) and compiles its kernels when they are first called. Its operands
are this project's as they are: e4m3fn rows with one float32 scale per 128 columns, e4m3fn weights
with one per 128 x 128; or both in bfloat16. Around its two products stand kernels of ours
(kernels/placed.py).

Of its layouts for grouped rows the one with sums on the device is taken (``use_psum_layout``): rows
in one block of memory, each expert's padded to the kernel's tile, and ``ends``, where each
expert's end. The scheduler (include/deep_gemm/scheduler/gemm.cuh) walks the tiles that ``ends``
tell of and no others, so that a graph is captured for the most rows there can be and pays for those
there are. The layout with an expert per row loads every tile of the upper bound, though it
computes no tile of -1: on a shard of half of the experts, twice the rows. The masked one needs
room for every row at every expert.

A shared expert is no group: groups have one width. It is computed on a stream of its own beside the
others, of which it needs nothing, and added where they are summed.
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
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.load import SlotLoad
from ffn_worker.moe.choice import mean_pairs
from ffn_worker.moe.quantise import Scheme, Weight, in_scheme, widened
from ffn_worker.moe.side_stream import SideStream
from ffn_worker.moe.sorting import PlacedPairs, capacity, place_pairs_on_gpu
from ffn_worker.moe.triton import Layer, TritonBackend

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
class Operand:
    """bfloat16 rows [room, k]; or FP8 rows with their scales as the library's TMA loads want them,
    [k / 128, room], if ``room`` is a multiple of 4."""

    codes: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def empty(cls, tag: Tag, room: int, k: int, device: torch.device) -> "Operand":
        codes = torch.empty((room, k), dtype=DTYPE_OF_TAG[tag], device=device)
        if tag == Tag.BFLOAT16:
            return cls(codes)
        return cls(codes, torch.empty((k // SCALE_BLOCK, room), dtype=torch.float32, device=device))

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales for a kernel that reads no scales where there are none."""
        return self.codes, self.codes if self.scales is None else self.scales


@dataclass(frozen=True)
class Cut:
    """How a batch is cut. tile: what an expert's rows are padded to. expected: see
    :func:`expected_rows`. room: slots that any routing fits into."""

    tile: int
    expected: int
    room: int


def _grouped_product(a: Operand, weight: Weight, placed: PlacedPairs, cut: Cut) -> torch.Tensor:
    """bfloat16 [room, N] = a x weight[expert].T for the rows in use; the others are undefined."""
    out = torch.empty(
        (a.codes.shape[0], weight.shape[1]), dtype=torch.bfloat16, device=a.codes.device
    )
    deep_gemm = library()
    # The height of its tiles is a setting of the process; whoever else uses it sets it too.
    deep_gemm.set_mk_alignment_for_contiguous_layout(cut.tile)
    product = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    rows, experts = a.codes, weight.codes
    if a.scales is not None:
        product = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        rows, experts = (rows, a.scales.t()), (experts, weight.scales)
    product(
        rows,
        experts,
        out,
        placed.ends,
        use_psum_layout=True,
        expected_m_for_psum_layout=cut.expected,
    )
    return out


def _product(a: Operand, weight: Weight, out: torch.Tensor) -> None:
    """out bfloat16 [rows, N] = a x weight.T, weight [N, K], on a part of the device. a: the scales
    may be of more rows, up to a multiple of 4."""
    deep_gemm, count = library(), len(out)
    rows, columns = a.codes[:count], weight.codes
    product = deep_gemm.bf16_gemm_nt
    if a.scales is not None:
        product = deep_gemm.fp8_gemm_nt
        rows, columns = (rows, a.scales.t()[:count]), (columns, weight.scales)
    every = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(beside(every))
    try:
        product(rows, columns, out)
    finally:
        deep_gemm.set_num_sms(every)


def _sum(
    y: torch.Tensor,
    slots: torch.Tensor,
    weights: torch.Tensor,
    shared: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out [rows, hidden]: each row's results by their slots, weighed and added, and ``shared``."""
    from ffn_worker.kernels.placed import sum_slots_kernel

    (count, hidden), block = out.shape, 1024
    sum_slots_kernel[(count, -(-hidden // block))](
        y,
        slots,
        weights,
        y if shared is None else shared,
        out,
        hidden,
        TOP_K=weights.shape[1],
        SHARED=shared is not None,
        BLOCK=block,
        num_warps=4,
    )


@dataclass(frozen=True)
class _Shared:
    """A shared expert, its width rounded up to whole scales. gate_up: [2 * width, hidden]. down:
    [hidden, width]."""

    gate_up: Weight
    down: Weight


def _silu(tag: Tag, h: torch.Tensor, slots: torch.Tensor | None, pairs: int) -> Operand:
    """silu(gate) * up of h [room, 2 * width] in FP8 or bfloat16, for the slots of ``pairs`` pairs;
    slots None: for every row."""
    from ffn_worker.kernels.placed import silu_kernel

    room, width = h.shape[0], h.shape[1] // 2
    a, rows, groups = Operand.empty(tag, room, width, h.device), 4, 8
    silu_kernel[(-(-pairs // rows), -(-width // (SCALE_BLOCK * groups)))](
        h,
        h if slots is None else slots,
        *a.pointers,
        pairs,
        width,
        room,
        PLACED=slots is not None,
        FP8_MAX=FP8_MAX.get(tag, 0.0),
        PAIRS=rows,
        GROUPS=groups,
    )
    return a


class DeepGemmBackend(TritonBackend):
    """Experts [start, end), bfloat16 or FP8_BLOCK; with these a shared expert of any width. Rows in
    the format of the weights are multiplied as they are, others brought into it first."""

    schemes = (Scheme.PLAIN, Scheme.FP8_BLOCK)

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
            return "its kernels with float32 scales are for NVIDIA Hopper (sm_90)"
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
        scheme = self._layers[layer].w2.scheme
        self._beside[layer] = _Shared(
            *(
                in_scheme(weight, scheme, self.fp8, torch.bfloat16)
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
            _sum(y, placed.slots, topk_weights, None, out)
            return
        assert self._side is not None  # set by prepare_shared
        added = torch.empty_like(out)
        with self._side.branch():
            self._apart(shared, rows, added)
        y, placed = self._routed(layer, rows, topk_ids, load)
        self._side.join()
        _sum(y, placed.slots, topk_weights, added, out)

    @staticmethod
    def _apart(shared: _Shared, rows: EncodedRows, out: torch.Tensor) -> None:
        """The shared expert's results of all rows."""
        scales = None if rows.scales is None else rows.scales.t()
        room = -(-len(rows) // 4) * 4  # as the library wants scales
        h = torch.empty((room, shared.gate_up.shape[0]), dtype=torch.bfloat16, device=rows.device)
        _product(Operand(rows.payload, scales), shared.gate_up, h[: len(rows)])
        _product(_silu(rows.tag, h, None, len(rows)), shared.down, out)

    def _routed(
        self, layer: int, rows: EncodedRows, topk_ids: torch.Tensor, load: SlotLoad | None
    ) -> tuple[torch.Tensor, PlacedPairs]:
        """Both products of the routed experts: bfloat16 [room, hidden], by slots."""
        held, experts = self._layers[layer], self.end - self.start
        count, top_k = topk_ids.shape
        mean = mean_pairs(count, top_k, self.num_experts)
        tile = tile_rows(mean)
        counts = None if load is None else load.counts
        placed = place_pairs_on_gpu(topk_ids, self.start, self.end, tile, counts)
        cut = Cut(tile, expected_rows(mean, tile), capacity(count * top_k, experts, tile))
        a = self._activation(held, rows, placed, top_k, cut)
        return self._results(held, a, placed, count, top_k, cut), placed

    def _results(
        self, held: Layer, a: Operand, placed: PlacedPairs, rows: int, top_k: int, cut: Cut
    ) -> torch.Tensor:
        """The second product of the routed experts: bfloat16 [room, hidden], by slots."""
        return _grouped_product(a, held.w2[: held.shape.experts], placed, cut)

    def _activation(
        self, held: Layer, rows: EncodedRows, placed: PlacedPairs, top_k: int, cut: Cut
    ) -> Operand:
        """silu(gate) * up of the routed experts, by slots, in the format of the rows."""
        from ffn_worker.kernels.placed import gather_rows_kernel

        hidden, room = held.shape.hidden, cut.room
        given = Operand(rows.payload, rows.scales)
        a = Operand.empty(rows.tag, room, hidden, rows.device)
        gather_rows_kernel[(len(rows),)](
            *given.pointers,
            placed.slots,
            *a.pointers,
            hidden,
            room,
            EACH=top_k,
            SCALED=rows.scales is not None,
            BLOCK=1 << (hidden - 1).bit_length(),
        )
        h = _grouped_product(a, held.w13[: held.shape.experts], placed, cut)
        return _silu(rows.tag, h, placed.slots, len(rows) * top_k)
