"""Backend on DeepGEMM's grouped products, FP8 and bfloat16, for NVIDIA Hopper.

The library comes with vLLM 0.26 (vllm.third_party.deep_gemm, version 2.5.0; source
github.com/deepseek-ai/DeepGEMM) and compiles each kernel at its first call. Its operands have this
project's formats: e4m3fn rows with one float32 scale per 128 columns and e4m3fn weights with one
per 128 x 128, or both in bfloat16. The kernels around its two products are in kernels/placed.py.

Of its layouts for grouped rows, this backend uses the one with row counts on the device
(``use_psum_layout``). All rows are in one block of memory, each expert's run is padded to the
kernel's tile, and ``ends`` tells where each run ends. The scheduler
(include/deep_gemm/scheduler/gemm.cuh) visits only the tiles in ``ends``. So a graph can be captured
for the largest possible number of rows, and a replay pays only for the actual rows.

The other layouts cost more. The one with an expert per row loads every tile of the upper bound,
even those of expert -1, which it does not compute: twice the rows on a shard of half of the
experts. The masked one needs room for all rows at every expert.

A shared expert cannot be a group, because all groups have the same width. It is computed
concurrently on a second stream and added in the final sum.
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
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe.batch_selection import mean_pairs
from ffn_worker.moe.load_counts import SlotLoad
from ffn_worker.moe.quantise import Weight, in_scheme, widened
from ffn_worker.moe.side_stream import SideStream
from ffn_worker.moe.sorting import PlacedPairs, capacity, place_pairs_on_gpu
from ffn_worker.moe.triton import Layer, TritonBackend

_FOLDER = Path("third_party/deep_gemm")


def tile_rows(mean: float) -> int:
    """Rows of a tile at ``mean`` pairs per expert.

    64 is Hopper's minimum. In a tile of 128, a half without rows is loaded and stored but not
    computed.
    """
    return 64 if mean <= 64 else 128


def expected_rows(mean: float, tile: int) -> int:
    """Rows per group from which the library chooses the columns of a tile.

    The library rounds them up to whole tiles and multiplies by the groups to get the number of
    tiles. The last tile of an expert is half full on average. Powers of two, because each value may
    need another kernel, which takes seconds to compile when a batch first uses it.

    Args:
        mean: mean pairs per expert. tile: rows of a tile.
    """
    return tile << max(0, round(math.log2(mean / tile + 0.5)))


def shared_multiprocessors(sms: int) -> int:
    """Multiprocessors for the products of the shared expert, of ``sms`` on the device.

    Half of them, so that the routed experts' rows can be sorted and gathered meanwhile. An even
    number, as the library requires.
    """
    return max(2, sms // 4 * 2)


@cache
def library() -> ModuleType:
    """Imports DeepGEMM and sets it up, once.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        from vllm.third_party import deep_gemm  # only in GPU builds
    except (ImportError, AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"DeepGEMM cannot be imported ({error}); use ffn.backend: triton"
        ) from error
    # Programmatic dependent launch: a kernel starts while the previous one ends, as under vLLM.
    module: ModuleType = deep_gemm
    module.set_pdl(True)
    return module


def _compiler() -> Path:
    """Path where DeepGEMM looks for nvcc."""
    if named := os.environ.get("DG_JIT_NVCC_COMPILER"):
        return Path(named)
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        return Path(home) / "bin/nvcc"
    return Path(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")


@dataclass(frozen=True)
class Operand:
    """bfloat16 rows [room, k], or FP8 rows with scales float32 [k / 128, room].

    This is the layout of the library's TMA loads; ``room`` must be a multiple of 4 for them.
    """

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
        """Kernel arguments: codes and scales, or the codes twice if there are no scales to read."""
        return self.codes, self.codes if self.scales is None else self.scales


@dataclass(frozen=True)
class SlotLayout:
    """Slots of a batch. tile: each expert's run is padded to a multiple of it. expected: see
    :func:`expected_rows`. room: slots that are enough for any routing."""

    tile: int
    expected: int
    room: int


_LibraryOperand = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Codes, or (codes, scales)."""


def _grouped_product(
    a: Operand, weight: Weight, placed: PlacedPairs, layout: SlotLayout
) -> torch.Tensor:
    """bfloat16 [room, N] = a x weight[expert].T by slots; slots without a pair are undefined."""
    out = torch.empty(
        (a.codes.shape[0], weight.shape[1]), dtype=torch.bfloat16, device=a.codes.device
    )
    deep_gemm = library()
    # The rows of a tile are a setting of the process. Other users of the library set it, too.
    deep_gemm.set_mk_alignment_for_contiguous_layout(layout.tile)
    product = deep_gemm.m_grouped_bf16_gemm_nt_contiguous
    rows: _LibraryOperand = a.codes
    experts: _LibraryOperand = weight.codes
    if a.scales is not None:
        product = deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        assert weight.scales is not None
        rows, experts = (a.codes, a.scales.t()), (weight.codes, weight.scales)
    product(
        rows,
        experts,
        out,
        placed.ends,
        use_psum_layout=True,
        expected_m_for_psum_layout=layout.expected,
    )
    return out


def _product(a: Operand, weight: Weight, out: torch.Tensor) -> None:
    """out bfloat16 [rows, N] = a x weight.T, weight [N, K], on a part of the multiprocessors.

    The scales of ``a`` may be padded to a multiple of 4 rows.
    """
    deep_gemm, count = library(), len(out)
    product = deep_gemm.bf16_gemm_nt
    rows: _LibraryOperand = a.codes[:count]
    columns: _LibraryOperand = weight.codes
    if a.scales is not None:
        assert weight.scales is not None
        product = deep_gemm.fp8_gemm_nt
        rows = a.codes[:count], a.scales.t()[:count]
        columns = weight.codes, weight.scales
    every = deep_gemm.get_num_sms()
    deep_gemm.set_num_sms(shared_multiprocessors(every))
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
    """out [rows, hidden] = weighted sum of each row's results in y, plus ``shared``."""
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
    """A shared expert, its width rounded up to whole scales.

    gate_up: [2 * width, hidden]. down: [hidden, width].
    """

    gate_up: Weight
    down: Weight


def _silu(tag: Tag, h: torch.Tensor, slots: torch.Tensor | None, pairs: int) -> Operand:
    """silu(gate) * up of h [room, 2 * width], in FP8 or bfloat16, for the slots of ``pairs`` pairs.

    slots None: for the first ``pairs`` rows.
    """
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
    """Experts [start, end), bfloat16 or FP8_BLOCK, and a shared expert of any width. Rows are
    converted to the format of the weights unless they have it."""

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._shared: dict[int, _Shared] = {}
        self._side: SideStream | None = None
        library()

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        reason = TritonBackend.unavailable(dtype, hidden, intermediate)
        if reason is not None:
            return reason
        if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
            return "its kernels with float32 scales run on NVIDIA Hopper (sm_90) only"
        if dtype is not torch.bfloat16:
            return f"it computes in bfloat16, not {dtype}"
        if hidden % SCALE_BLOCK or intermediate % SCALE_BLOCK:
            return f"sizes must be multiples of {SCALE_BLOCK}, not {hidden} and {intermediate}"
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            return "the package vllm, which brings DeepGEMM, is not installed"
        folder = Path(spec.origin).parent / _FOLDER
        if not (folder / "include/deep_gemm").is_dir():
            return f"{folder} holds no DeepGEMM with its headers; reinstall vllm"
        if os.environ.get("DG_JIT_USE_NVRTC", "0") == "0" and not _compiler().is_file():
            return (
                f"DeepGEMM finds no compiler at {_compiler()}; set CUDA_HOME to a CUDA toolkit, or "
                "DG_JIT_USE_NVRTC=1"
            )
        return None

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        width = -(-down.shape[-1] // SCALE_BLOCK) * SCALE_BLOCK
        scheme = self._layers[layer].w2.scheme
        self._shared[layer] = _Shared(
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
        self._shared.pop(layer, None)

    def _compute(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        load: SlotLoad | None,
    ) -> None:
        shared = self._shared.get(layer)
        if shared is None:
            y, placed = self._routed(layer, rows, topk_ids, load)
            _sum(y, placed.slots, topk_weights, None, out)
            return
        assert self._side is not None  # set by prepare_shared
        added = torch.empty_like(out)
        with self._side.branch():
            self._shared_results(shared, rows, added)
        y, placed = self._routed(layer, rows, topk_ids, load)
        self._side.join()
        _sum(y, placed.slots, topk_weights, added, out)

    @staticmethod
    def _shared_results(shared: _Shared, rows: EncodedRows, out: torch.Tensor) -> None:
        """Computes the shared expert's results for all rows."""
        scales = None if rows.scales is None else rows.scales.t()
        room = -(-len(rows) // 4) * 4  # as the library requires for scales
        h = torch.empty((room, shared.gate_up.shape[0]), dtype=torch.bfloat16, device=rows.device)
        _product(Operand(rows.payload, scales), shared.gate_up, h[: len(rows)])
        _product(_silu(rows.tag, h, None, len(rows)), shared.down, out)

    def _routed(
        self, layer: int, rows: EncodedRows, topk_ids: torch.Tensor, load: SlotLoad | None
    ) -> tuple[torch.Tensor, PlacedPairs]:
        """Results of the routed experts: bfloat16 [room, hidden] by slots, and the slots."""
        held, experts = self._layers[layer], self.end - self.start
        count, top_k = topk_ids.shape
        mean = mean_pairs(count, top_k, self.num_experts)
        tile = tile_rows(mean)
        counts = None if load is None else load.counts
        placed = place_pairs_on_gpu(topk_ids, self.start, self.end, tile, counts)
        layout = SlotLayout(tile, expected_rows(mean, tile), capacity(count * top_k, experts, tile))
        a = self._activation(held, rows, placed, top_k, layout)
        return self._results(held, a, placed, count, top_k, layout), placed

    def _results(
        self,
        held: Layer,
        a: Operand,
        placed: PlacedPairs,
        rows: int,
        top_k: int,
        layout: SlotLayout,
    ) -> torch.Tensor:
        """The second product of the routed experts: bfloat16 [room, hidden] by slots."""
        return _grouped_product(a, held.w2[: held.shape.experts], placed, layout)

    def _activation(
        self, held: Layer, rows: EncodedRows, placed: PlacedPairs, top_k: int, layout: SlotLayout
    ) -> Operand:
        """silu(gate) * up of the routed experts by slots, in the format of the rows."""
        from ffn_worker.kernels.placed import gather_rows_kernel

        hidden, room = held.shape.hidden, layout.room
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
        h = _grouped_product(a, held.w13[: held.shape.experts], placed, layout)
        return _silu(rows.tag, h, placed.slots, len(rows) * top_k)
