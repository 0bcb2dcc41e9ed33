"""Backend for NVIDIA Hopper with products of ours in the place of DeepGEMM's.

DeepGEMM's first product wants the rows gathered into slots and leaves 16 bits that are read again
for SiLU. For bfloat16 weights both products are ours (:mod:`ffn_worker.moe.grouped_plain`). For FP8
ones it is the first: one kernel (kernels/grouped.cu) reads rows where they came and writes
silu(gate) * up in FP8. An expert of up to 144 rows (160 where tiles would be more than
multiprocessors) is one tile whose weights come through the L2 cache once, where DeepGEMM has tiles
of 128 rows and the weights twice from 129 rows on. What is before and behind it is as in
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
from ffn_worker.moe.deep_gemm import Cut, DeepGemmBackend, Operand
from ffn_worker.moe.device import launch_site
from ffn_worker.moe.quantise import Scheme, Weight
from ffn_worker.moe.sorting import PlacedPairs
from ffn_worker.moe.triton import Layer

_COPIED = 16
"""Bytes that the kernel copies of a row at once: its address must be a multiple."""


def cannot_compile() -> str | None:
    """Why the kernel cannot be compiled here, beside what DeepGEMM needs."""
    for name in ("cuda", "cuda.bindings"):
        if importlib.util.find_spec(name) is None:
            return "the package cuda-bindings, by which its kernel is compiled, is not installed"
    return None


@cache
def _cubin() -> bytes:
    return compiled(grouped.source(), "grouped.cu", grouped.OPTIONS)


@cache
def _kernel(device: int, experts: int) -> Function:
    """The kernel, loaded for a device. Whoever calls has its context current, as torch has."""
    return Function.load(_cubin(), grouped.ENTRY, grouped.THREADS, grouped.shared_bytes(experts))


def gate_up(
    rows: EncodedRows, weight: Weight, placed: PlacedPairs, top_k: int, cut: Cut
) -> Operand:
    """silu(gate) * up of FP8 rows [n, K] and weights [E, 2 * width, K], by slots; the others are
    undefined."""
    assert weight.scales is not None and rows.scales is not None
    experts, columns, k = weight.shape
    device = rows.device
    a = Operand.empty(rows.tag, cut.room, columns // 2, device)
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
    sizes = (experts, columns // 2, k // SCALE_BLOCK, top_k, cut.room, cut.tile)
    arguments: list[Argument] = [walk]
    arguments += [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
    arguments += [ctypes.c_int(size) for size in sizes]
    index, blocks, stream = launch_site(device)
    _kernel(index, experts).launch(blocks, stream, arguments)
    return a


class GroupedBackend(DeepGemmBackend):
    """Experts [start, end), bfloat16 or FP8_BLOCK; with these a shared expert of any width. Rows in
    the format of the weights are multiplied where they lie, others brought into it first."""

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
        self, held: Layer, rows: EncodedRows, placed: PlacedPairs, top_k: int, cut: Cut
    ) -> Operand:
        if rows.payload.data_ptr() % _COPIED:
            return super()._activation(held, rows, placed, top_k, cut)
        ours = gate_up if held.w13.scheme is Scheme.FP8_BLOCK else grouped_plain.gate_up
        return ours(rows, held.w13[: held.shape.experts], placed, top_k, cut)

    def _results(
        self, held: Layer, a: Operand, placed: PlacedPairs, rows: int, top_k: int, cut: Cut
    ) -> torch.Tensor:
        if held.w2.scheme is Scheme.FP8_BLOCK:
            return super()._results(held, a, placed, rows, top_k, cut)
        return grouped_plain.down(a, held.w2[: held.shape.experts], placed, cut)
