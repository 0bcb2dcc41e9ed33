"""Times the routed experts of one layer on one GPU, with rows routed as in natural text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from afd_bench.moe.layers import CACHE_BYTES, Batch, Problem, problem
from afd_bench.moe.measure import Contender
from afd_bench.moe.timing import Call, as_graph, clock_of, repetitions_for
from afd_bench.tables.cells import ExpertCell
from afd_planner.sizing.imbalance import load_spread
from ffn_worker.moe.device import native_fp8
from ffn_worker.moe.tiles import LayerShape

_ROUND_S = 0.005


@contextmanager
def shard(cell: ExpertCell, device: torch.device) -> Iterator[tuple[Problem, Contender]]:
    """Random weights of the cell's shard on its backend; for all cells with the same shard."""
    shape = LayerShape(
        cell.hidden, cell.width, cell.experts, cell.num_experts, cell.top_k, cell.scheme
    )
    with problem(shape, device, 0 if device.type == "cpu" else CACHE_BYTES) as made:
        yield made, Contender(made.ffn(cell.backend), lambda given: given.encoded)


def experts_us(cell: ExpertCell, made: Problem, contender: Contender) -> tuple[float, int, int]:
    """Returns (microseconds of one layer, (row, expert) pairs here, experts here with a row)."""
    given = batch(cell, made.device)
    call: Call = contender.call(given)
    if made.device.type != "cpu":
        call = as_graph(call)
    clock = clock_of(made.device)
    count = repetitions_for(clock(call, 1), _ROUND_S)
    seconds = clock(call, count) / len(made.model.moe_layers)
    local = given.ids[given.ids < cell.experts]
    return 1e6 * seconds, int(local.numel()), int(local.unique().numel())


def batch(cell: ExpertCell, device: torch.device) -> Batch:
    """Returns normally distributed rows and their experts.

    A row draws its experts without repetition, in proportion to popularities that are log-normal
    with the spread of afd_planner/data/routing. Popularities are dealt to the GPUs at random.
    """
    generator = torch.Generator(device).manual_seed(cell.rows + cell.experts)
    x = torch.randn(cell.rows, cell.hidden, generator=generator, device=device).bfloat16()
    sigma = math.sqrt(math.log1p(load_spread().spread ** 2))
    share = (torch.arange(cell.num_experts, device=device) + 0.5) / cell.num_experts
    popular = sigma * math.sqrt(2) * torch.erfinv(2 * share - 1)  # logarithms of popularities
    popular = popular[torch.randperm(cell.num_experts, generator=generator, device=device)]
    draw = torch.rand(cell.rows, cell.num_experts, generator=generator, device=device)
    gumbel = -torch.log(-torch.log(draw.clamp(1e-7, 1 - 1e-7)))
    ids = (popular + gumbel).topk(cell.top_k).indices.int()
    weights = torch.rand(cell.rows, cell.top_k, generator=generator, device=device)
    tags = {"fp8_block": native_fp8(), "mxfp4": Tag.E2M1}
    plain = EncodedRows.of(x)
    encoded = EncodedRows.of(x, tags[cell.scheme]) if cell.scheme in tags else plain
    return Batch(plain, encoded, ids, weights)
