"""Both products of bfloat16 experts by kernels of ours (kernels/grouped_plain.cu), on Hopper.

The first reads rows where they came and leaves silu(gate) * up in the slots; the second reads the
slots. An expert's rows are cut into equal tiles of at most 192, of which at most 7 rows are empty,
where DeepGEMM's tiles have 128 rows.
"""

import ctypes
from functools import cache

import torch

from afd.wire.rows_torch import EncodedRows
from ffn_worker.kernels import grouped_plain as kernels
from ffn_worker.kernels.cuda_driver import Argument, Function, compiled, tensor_map
from ffn_worker.moe.deep_gemm import Cut, Operand
from ffn_worker.moe.device import launch_site
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.sorting import PlacedPairs

_LINE = kernels.DEPTH * 2
"""Bytes of a row that are loaded at once."""


@cache
def _cubin() -> bytes:
    return compiled(kernels.source(), "grouped_plain.cu", kernels.OPTIONS)


@cache
def _kernel(name: str, device: int, experts: int) -> Function:
    """A kernel, loaded for a device. Whoever calls has its context current, as torch has."""
    return Function.load(_cubin(), name, kernels.THREADS, kernels.shared_bytes(experts))


def _weight_map(weight: torch.Tensor, halves_apart: int, groups: int) -> ctypes.Array:
    """Weights [E, N, K] in groups of 16 rows: 8, and 8 that lie ``halves_apart`` rows behind."""
    experts, _, k = weight.shape
    row, half = k * 2, kernels.GROUP // 2
    # Where both halves of a group lie together the next begins behind them.
    group = kernels.GROUP if halves_apart == half else half
    return tensor_map(
        weight.data_ptr(),
        (row, half, 2, groups, experts),
        (row, halves_apart * row, group * row, weight.stride(0) * 2),
        (_LINE, half, 2, kernels.TILE_GROUPS, 1),
    )


def _launch(
    name: str,
    weight_map: ctypes.Array,
    rows: torch.Tensor,
    out: torch.Tensor,
    placed: PlacedPairs,
    sizes: tuple[int, ...],
) -> None:
    """sizes: experts, groups of weights, stages of the depth, top_k, tile of the slots."""
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
    rows: EncodedRows, weight: Weight, placed: PlacedPairs, top_k: int, cut: Cut
) -> Operand:
    """silu(gate) * up of bfloat16 rows [n, K] and weights [E, 2 * width, K], by slots; the others
    are undefined. Once per ``placed``."""
    experts, columns, k = weight.shape
    width = columns // 2
    a = Operand.empty(rows.tag, cut.room, width, rows.device)
    groups = columns // kernels.GROUP
    walk = _weight_map(weight.codes, width, groups)
    sizes = experts, groups, k // kernels.DEPTH, top_k, cut.tile
    _launch(kernels.GATE_UP, walk, rows.payload, a.codes, placed, sizes)
    return a


def down(a: Operand, weight: Weight, placed: PlacedPairs, cut: Cut) -> torch.Tensor:
    """bfloat16 [room, hidden] = a [room, K] x weight [E, hidden, K].T by slots; the others are
    undefined. Once per ``placed``."""
    experts, hidden, k = weight.shape
    out = torch.empty((cut.room, hidden), dtype=torch.bfloat16, device=a.codes.device)
    groups = hidden // kernels.GROUP
    walk = _weight_map(weight.codes, kernels.GROUP // 2, groups)
    sizes = experts, groups, k // kernels.DEPTH, 1, cut.tile
    _launch(kernels.DOWN, walk, a.codes, out, placed, sizes)
    return out
