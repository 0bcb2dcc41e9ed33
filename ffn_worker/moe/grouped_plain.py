"""Both grouped products of bfloat16 experts on Hopper, by CUDA kernels (kernels/grouped_plain.cu).

The first gathers rows from where they arrived and writes silu(gate) * up to the slots. The second
multiplies the slots. An expert's rows are split into equal tiles of at most 192 rows, with at most
7 empty rows per tile; DeepGEMM's tiles have 128 rows.
"""

import ctypes
from functools import cache

import torch

from afd.wire.rows_torch import EncodedRows
from ffn_worker.kernels import grouped_plain as kernels
from ffn_worker.kernels.cuda_driver import Argument, Function, Map, compiled, tensor_map
from ffn_worker.moe.deep_gemm import Operand, SlotLayout
from ffn_worker.moe.device import launch_site
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.sorting import PlacedPairs

_LINE = kernels.DEPTH * 2
"""Bytes of a row per stage."""


@cache
def _cubin() -> bytes:
    return compiled(kernels.source(), "grouped_plain.cu", kernels.OPTIONS)


@cache
def _kernel(name: str, device: int, experts: int) -> Function:
    """A kernel, loaded for a device, whose context must be current, as torch makes it."""
    return Function.load(_cubin(), name, kernels.THREADS, kernels.shared_bytes(experts))


def _weight_map(weight: torch.Tensor, halves_apart: int, groups: int) -> Map:
    """Tensor map of weights [E, N, K] in groups of 16 rows: 8 rows, and 8 rows that come
    ``halves_apart`` rows later."""
    experts, _, k = weight.shape
    row, half = k * 2, kernels.GROUP // 2
    # If the halves of a group are adjacent, the next group begins after both.
    group = kernels.GROUP if halves_apart == half else half
    return tensor_map(
        weight.data_ptr(),
        (row, half, 2, groups, experts),
        (row, halves_apart * row, group * row, weight.stride(0) * 2),
        (_LINE, half, 2, kernels.TILE_GROUPS, 1),
    )


def _launch(
    name: str,
    weight_map: Map,
    rows: torch.Tensor,
    out: torch.Tensor,
    placed: PlacedPairs,
    sizes: tuple[int, ...],
) -> None:
    """Launches a kernel. sizes: experts, groups of weights, stages per tile, top_k, slot tile."""
    row = rows.shape[1] * 2
    row_map = tensor_map(rows.data_ptr(), (row, rows.shape[0]), (row,), (_LINE, kernels.ROW_BOX))
    queue = placed.taken[int(name == kernels.DOWN) :]
    arguments: list[Argument] = [weight_map, row_map]
    arguments += [
        ctypes.c_void_p(tensor.data_ptr())
        for tensor in (rows, placed.pairs, placed.ends, out, queue)
    ]
    arguments += [ctypes.c_int(size) for size in sizes]
    index, blocks, stream = launch_site(rows.device)
    _kernel(name, index, sizes[0]).launch(blocks, stream, arguments)


def gate_up(
    rows: EncodedRows, weight: Weight, placed: PlacedPairs, top_k: int, layout: SlotLayout
) -> Operand:
    """silu(gate) * up of bfloat16 rows [n, K] and weights [E, 2 * width, K], by slots.

    Slots without a pair are undefined. Call it once per ``placed``, whose counters it uses up.
    """
    experts, columns, k = weight.shape
    width = columns // 2
    a = Operand.empty(rows.tag, layout.room, width, rows.device)
    groups = columns // kernels.GROUP
    walk = _weight_map(weight.codes, width, groups)
    sizes = experts, groups, k // kernels.DEPTH, top_k, layout.tile
    _launch(kernels.GATE_UP, walk, rows.payload, a.codes, placed, sizes)
    return a


def down(a: Operand, weight: Weight, placed: PlacedPairs, layout: SlotLayout) -> torch.Tensor:
    """bfloat16 [room, hidden] = a [room, K] x weight [E, hidden, K].T by slots.

    Slots without a pair are undefined. Call it once per ``placed``, whose counters it uses up.
    """
    experts, hidden, k = weight.shape
    out = torch.empty((layout.room, hidden), dtype=torch.bfloat16, device=a.codes.device)
    groups = hidden // kernels.GROUP
    walk = _weight_map(weight.codes, kernels.GROUP // 2, groups)
    sizes = experts, groups, k // kernels.DEPTH, 1, layout.tile
    _launch(kernels.DOWN, walk, a.codes, out, placed, sizes)
    return out
