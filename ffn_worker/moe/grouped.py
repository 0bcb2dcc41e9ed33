"""Backend for NVIDIA Hopper with this project's CUDA kernels for grouped products.

They replace products of DeepGEMM, whose first product needs rows gathered into slots and returns
bfloat16, which SiLU has to read again:

- bfloat16 weights: both products (:mod:`ffn_worker.moe.grouped_plain`).
- FP8 weights: the first product. One kernel (kernels/grouped.cu) gathers rows from where they
  arrived and writes silu(gate) * up in FP8.

In the FP8 kernel, an expert of up to 144 rows is one tile (up to 160 if there would otherwise be
more tiles than multiprocessors), so its weights pass the L2 cache once. DeepGEMM's tiles have 128
rows, so that from 129 rows on it loads the weights twice. Everything else is as in
:mod:`ffn_worker.moe.deep_gemm`.
"""

import ctypes
import importlib.util
from functools import cache

import torch

from afd.errors import ConfigError
from afd.wire.layout import SCALE_BLOCK
from afd.wire.rows_torch import EncodedRows
from ffn_worker.kernels import grouped
from ffn_worker.kernels.cuda_driver import Argument, Function, compiled, tensor_map
from ffn_worker.moe import grouped_plain
from ffn_worker.moe.deep_gemm import DeepGemmBackend, Operand, SlotLayout
from ffn_worker.moe.device import launch_site
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.sorting import PlacedPairs
from ffn_worker.moe.triton import Layer

_COPIED = 16
"""Bytes per copy of a row; the address of the rows must be a multiple of it."""


def cannot_compile() -> str | None:
    """Why the CUDA kernels cannot be compiled here, None if they can. Does not check DeepGEMM."""
    for name in ("cuda", "cuda.bindings"):
        if importlib.util.find_spec(name) is None:
            return "the package cuda-bindings, which compiles its kernel, is not installed"
    return None


@cache
def _cubin() -> bytes:
    return compiled(grouped.source(), "grouped.cu", grouped.OPTIONS)


@cache
def _kernel(device: int, experts: int) -> Function:
    """The kernel, loaded for a device, whose context must be current, as torch makes it."""
    return Function.load(_cubin(), grouped.ENTRY, grouped.THREADS, grouped.shared_bytes(experts))


def gate_up(
    rows: EncodedRows, weight: Weight, placed: PlacedPairs, top_k: int, layout: SlotLayout
) -> Operand:
    """silu(gate) * up of FP8 rows [n, K] and weights [E, 2 * width, K], in FP8, by slots.

    Slots without a pair are undefined.
    """
    assert weight.scales is not None and rows.scales is not None
    experts, columns, k = weight.shape
    device = rows.device
    a = Operand.empty(rows.tag, layout.room, columns // 2, device)
    assert a.scales is not None
    codes = weight.codes
    walk = tensor_map(
        codes.data_ptr(),
        (k, columns, experts),
        (codes.stride(1), codes.stride(0)),
        (SCALE_BLOCK, grouped.WEIGHT_BOX, 1),
    )
    tensors = (
        weight.scales, rows.payload, rows.scales, placed.pairs, placed.ends, a.codes, a.scales
    )  # fmt: skip
    sizes = (experts, columns // 2, k // SCALE_BLOCK, top_k, layout.room, layout.tile)
    arguments: list[Argument] = [walk]
    arguments += [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    arguments += [ctypes.c_int(size) for size in sizes]
    index, blocks, stream = launch_site(device)
    _kernel(index, experts).launch(blocks, stream, arguments)
    return a


class GroupedBackend(DeepGemmBackend):
    """Experts [start, end), bfloat16 or FP8_BLOCK, and a shared expert of any width. Rows are
    converted to the format of the weights unless they have it, and are not gathered first."""

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        return DeepGemmBackend.unavailable(dtype, hidden, intermediate) or cannot_compile()

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        if w13.shape[0] > grouped.most_experts():
            raise ConfigError(
                f"ffn.backend: grouped holds at most {grouped.most_experts()} experts of a layer, "
                f"not {w13.shape[0]}; use more FFN instances, or backend: deep_gemm"
            )
        super().prepare(layer, w13, w2)

    def _activation(
        self, held: Layer, rows: EncodedRows, placed: PlacedPairs, top_k: int, layout: SlotLayout
    ) -> Operand:
        if rows.payload.data_ptr() % _COPIED:
            return super()._activation(held, rows, placed, top_k, layout)
        ours = gate_up if held.w13.scheme is Scheme.FP8_BLOCK else grouped_plain.gate_up
        return ours(rows, held.w13[: held.shape.experts], placed, top_k, layout)

    def _results(
        self,
        held: Layer,
        a: Operand,
        placed: PlacedPairs,
        rows: int,
        top_k: int,
        layout: SlotLayout,
    ) -> torch.Tensor:
        if held.w2.scheme is Scheme.FP8_BLOCK:
            return super()._results(held, a, placed, rows, top_k, layout)
        return grouped_plain.down(a, held.w2[: held.shape.experts], placed, layout)
