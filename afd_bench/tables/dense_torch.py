"""Times the matrix products around attention and experts, and the end of a step, on one device.

Weights are in bfloat16, as `afd serve` holds those of attention. Several layers take turns, so that
weights come from memory. Norms are vLLM's kernels: torch's own operations take several launches.
Rotary embedding, the write to the cache and the choice of experts are not included: a few
microseconds each.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import rms_norm

from afd_bench.moe.timing import cpu_clock, graph_seconds
from afd_bench.tables.cells import DenseCell, RestCell, spec_of
from afd_planner.facts.attention import GroupedQuery, Latent
from afd_planner.facts.model import LayerGroup

_L2_BYTES = 160 << 20
_LAUNCHES = 16
_EPSILON = 1e-6

Launch = Callable[[int], object]
Make = Callable[..., torch.Tensor]


def dense_us(cell: DenseCell, device: str) -> float:
    """Returns microseconds of one layer of a micro-batch of ``rows`` rows."""
    group = spec_of(cell.model).groups[-1]
    make = _maker(device)
    layers = [_layer(group, cell, make)]
    # A layer's launch returns the bytes of its weights on its first call.
    weights = layers[0][1]
    least = _L2_BYTES if device != "cpu" else 0
    layers += [_layer(group, cell, make) for _ in range(min(16, least // weights))]
    return _timed([layer for layer, _ in layers], device)


def rest_us(cell: RestCell, device: str) -> float:
    """Returns microseconds of the final norm, the LM head and sampling (temperature 1)."""
    make = _maker(device)
    x, norm, head = make(cell.rows, cell.hidden), make(cell.hidden), make(cell.vocab, cell.hidden)

    def launch(_: int) -> torch.Tensor:
        logits = (_norm(x, norm) @ head.mT).float()
        noise = torch.empty_like(logits).exponential_()
        return torch.softmax(logits, -1).div_(noise).argmax(-1)

    return _timed([launch], device)


def _timed(layers: list[Launch], device: str) -> float:
    def launch(number: int) -> None:
        layers[number % len(layers)](number)

    if device == "cpu":
        return 1e6 * cpu_clock(lambda: launch(0), 1)
    return 1e6 * graph_seconds(launch, max(_LAUNCHES, len(layers)), 1)


def _maker(device: str) -> Make:
    generator = torch.Generator(device).manual_seed(0)

    def make(*shape: int) -> torch.Tensor:
        found = torch.empty(shape, dtype=torch.bfloat16, device=device)
        return found.normal_(0, 0.02, generator=generator)

    return make


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if not x.is_cuda:
        return rms_norm(x, weight.shape, weight)
    from vllm import _custom_ops as ops

    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    ops.rms_norm(out, x, weight, _EPSILON)
    return out


def _add_and_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns the norm of the sum. On a GPU both arguments are overwritten, as in vLLM's layers."""
    if not x.is_cuda:
        return rms_norm(x + residual, weight.shape, weight)
    from vllm import _custom_ops as ops

    ops.fused_add_rms_norm(x, residual, weight, _EPSILON)
    return x


def _layer(group: LayerGroup, cell: DenseCell, make: Make) -> tuple[Launch, int]:
    """Returns a layer and the bytes of its weights."""
    attention, hidden = group.attention, group.ffn.hidden
    x, residual = make(cell.rows, hidden), make(cell.rows, hidden)
    before, after = make(hidden), make(hidden)
    router = make(group.ffn.router_parameters // hidden, hidden)
    core: Callable[[torch.Tensor], torch.Tensor]
    if isinstance(attention, Latent):
        core, weights = _latent(attention, cell, make)
    elif isinstance(attention, GroupedQuery):
        core, weights = _grouped(attention, cell, make)
    else:
        raise RuntimeError(f"{attention.kind} attention has no projections here")

    def launch(_: int) -> torch.Tensor:
        out = core(_norm(x, before))
        return _add_and_norm(out, residual, after) @ router.mT

    return launch, 2 * (weights + router.numel())


def _grouped(
    attention: GroupedQuery, cell: DenseCell, make: Make
) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    heads = attention.heads // cell.tp
    wide = heads * attention.head_dim
    kv = max(1, attention.kv_heads // cell.tp) * 2 * attention.head_dim
    first = (attention.query_rank or wide) + kv
    qkv, out = make(first, attention.hidden), make(attention.hidden, wide)
    up = make(wide, attention.query_rank) if attention.query_rank else None
    norm = make(attention.head_dim)

    def core(x: torch.Tensor) -> torch.Tensor:
        q = x @ qkv.mT
        q = q[:, : attention.query_rank or wide]
        if up is not None:
            q = q @ up.mT
        by_head = _norm(q.unflatten(-1, (heads, -1)), norm)
        return by_head.flatten(1) @ out.mT

    return core, qkv.numel() + out.numel() + (0 if up is None else up.numel())


def _latent(
    attention: Latent, cell: DenseCell, make: Make
) -> tuple[Callable[[torch.Tensor], torch.Tensor], int]:
    heads, rank = attention.heads // cell.tp, attention.rank
    first = attention.query_rank + rank + attention.rope_dim
    down = make(first, attention.hidden)
    up = make(heads * (attention.nope_dim + attention.rope_dim), attention.query_rank)
    absorb = make(heads, attention.nope_dim, rank)
    values = make(heads, rank, attention.head_value_dim)
    out = make(attention.hidden, heads * attention.head_value_dim)
    norms = make(attention.query_rank), make(rank)

    def core(x: torch.Tensor) -> torch.Tensor:
        low = x @ down.mT
        q_low, kv_low = low[:, : attention.query_rank], low[:, attention.query_rank :][:, :rank]
        _norm(kv_low, norms[1])
        q = _norm(q_low, norms[0]) @ up.mT
        nope = q.unflatten(-1, (heads, -1))[..., : attention.nope_dim].transpose(0, 1)
        latent = torch.bmm(nope, absorb)  # [heads, rows, rank], what the attention kernel takes
        return torch.bmm(latent, values).transpose(0, 1).flatten(1) @ out.mT

    return core, sum(w.numel() for w in (down, up, absorb, values, out))
