"""The cases of `afd bench gpu fused`. On CPU both sides are the references (a dry run)."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch

from afd.errors import ConfigError
from afd.wire.layout import SlotLayout, Tag, layouts
from afd.wire.rows_torch import EncodedRows
from afd.wire.slot_torch import sum_of_parts, take_rows
from afd.wire.slot_view_torch import RoutedRows, SlotView
from afd_bench.moe.timing import cpu_clock, graph_seconds
from afd_bench.step3 import fused_kernels as fused
from afd_bench.step3.load import Load
from attention_worker.kernels import fused_attention as served

Call = Callable[[], object]
_FP8 = torch.float8_e4m3fn
_EPS = 1e-5
_CALLS = 20
"""Calls per graph."""
_COLD_BYTES = 200e6
"""Bytes of weights that are used in turn: more than an L2 cache holds."""


@dataclass(frozen=True)
class Case:
    """A call of ours and the call of the peer that it is compared with."""

    name: str
    ours: Call
    peer_name: str
    peer: Call


def microseconds(call: Call, device: str) -> float:
    """Returns the time of one call in us."""
    if device == "cpu":
        return 1e6 * cpu_clock(call, 1)
    return 1e6 * graph_seconds(lambda _: call(), _CALLS, 10)


def cases(load: Load, device: str) -> Iterator[Case]:
    """Yields all cases. Raises ConfigError if vLLM's kernels are missing."""
    torch.manual_seed(0)
    yield from _messages(load, device)
    if device == "cpu":
        yield from _attention(load, device, None)
        return
    try:
        from vllm import _custom_ops
    except ImportError as err:
        raise ConfigError(f"the peers are vLLM's kernels ({err}); install vllm==0.26.0") from None
    yield from _attention(load, device, _custom_ops)
    yield from _served(load, device, _custom_ops)
    yield from _products(load, device, _custom_ops)


def _views(layout: SlotLayout, device: str) -> list[SlotView]:
    """Returns views of two of the four slots of one allocation."""
    memory = torch.zeros((4, layout.nbytes), dtype=torch.uint8, device=device)
    return [SlotView(memory[slot], layout) for slot in (0, 3)]


def _messages(load: Load, device: str) -> Iterator[Case]:
    a2f, f2a = layouts("fp8", "bfloat16", load.rows, load.hidden, load.top_k)
    sent, answers = _views(a2f, device), _views(f2a, device)
    rows = [load.rows] * len(sent)
    into = RoutedRows.empty_like(sent[0], sum(rows))

    def copies() -> None:
        for i, view in enumerate(sent):
            here = into.cut(i * load.rows, (i + 1) * load.rows)
            assert view.scales is not None and here.x.scales is not None
            assert view.ids is not None and view.weights is not None
            here.x.payload.copy_(view.payload)
            here.x.scales.copy_(view.scales)
            here.ids.copy_(view.ids)
            here.weights.copy_(view.weights)

    yield Case("rows of two FP8 messages", lambda: take_rows(sent, rows, into), "8 copies", copies)
    yield Case(
        "sum of two answers",
        lambda: sum_of_parts(answers, load.rows, torch.bfloat16),
        "4 kernels of torch",
        lambda: _sum(answers),
    )


def _sum(views: list[SlotView]) -> torch.Tensor:
    total = views[0].payload.float()
    for view in views[1:]:
        total += view.payload.float()
    return total.bfloat16()


def _attention(load: Load, device: str, ops: ModuleType | None) -> Iterator[Case]:
    """Yields the kernels of the attention layer. ops: vLLM's; None times only a reference."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def scaled(columns: int) -> fused.Product:
        ones = torch.ones(load.rows, 1, device=device), torch.ones(columns, device=device)
        return fused.Product(drawn(load.rows, columns), *ones)

    _, f2a = layouts("fp8", "bfloat16", load.rows, load.hidden, load.top_k)
    views, width = _views(f2a, device), load.head_dim
    parts = [view.payload for view in views]
    residual, weight = drawn(load.rows, load.hidden), drawn(load.hidden)
    low_weight, one = drawn(load.q_rank), torch.ones(1, device=device)
    qkv, q = scaled(load.q_rank + 2 * width), scaled(load.heads * width)
    product, core = scaled(load.hidden), drawn(load.rows, load.heads * width)
    positions = torch.arange(load.rows, device=device)
    rope = served.Rope(drawn(load.rows, width), positions)
    keys, values = (torch.zeros(load.rows, 64, 1, width, device=device).to(_FP8) for _ in range(2))
    cache = served.PagedCache(keys, values, (one, one), 64 * positions)
    if ops is None:
        yield Case(
            "attention's references",
            lambda: fused.plain_norm_store(qkv, low_weight, _EPS, rope, cache, _FP8),
            "themselves",
            lambda: fused.plain_norm_store(qkv, low_weight, _EPS, rope, cache, _FP8),
        )
        return
    yield Case(
        "two answers, residual, norm, FP8",
        lambda: fused.sum_norm_quantise(parts, residual, weight, _EPS, _FP8),
        "sum by torch, norm and FP8 by vLLM (5 kernels)",
        lambda: ops.rms_norm_dynamic_per_token_quant(
            _sum(views), weight, _EPS, _FP8, None, residual
        ),
    )

    def ours() -> None:
        fused.norm_store(qkv, low_weight, _EPS, rope, cache, _FP8)
        fused.rope_quantise(q, width, rope, one, _FP8)

    def peer() -> None:
        low = qkv.values[:, : load.q_rank].contiguous()
        ops.rms_norm_dynamic_per_token_quant(low, low_weight, _EPS, _FP8)
        k, v = qkv.values[:, load.q_rank :].split(width, dim=-1)
        ops.rotary_embedding(positions, q.values, k, width, rope.cos_sin, True)
        ops.scaled_fp8_quant(q.values, one)
        stored = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
        ops.reshape_and_cache_flash(
            k.unsqueeze(1), v.unsqueeze(1), *stored, cache.slots, "fp8", one, one
        )

    yield Case("low-rank norm, rotation, FP8, cache (2 kernels)", ours, "vLLM (5 kernels)", peer)
    yield Case(
        "FP8 of the core's rows",
        lambda: fused.quantise_rows(core, _FP8),
        "vLLM",
        lambda: ops.scaled_fp8_quant(core, use_per_token_if_dynamic=True),
    )
    yield Case(
        "product, residual, norm",
        lambda: fused.add_norm(product, residual, weight, _EPS),
        "vLLM, of a product that is scaled",
        lambda: ops.fused_add_rms_norm(product.values, residual, weight, _EPS),
    )


def _served(load: Load, device: str, ops: ModuleType) -> Iterator[Case]:
    """Yields the kernels of servers (attention.fused), at the shapes of Qwen3-30B-A3B and Step-3,
    on a bfloat16 cache. The peers are the kernels that vLLM's layers launch."""
    rows, one = load.rows, torch.ones(1, device=device)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    positions = torch.arange(rows, device=device)

    def around(kv_heads: int, width: int) -> tuple[served.Rope, served.PagedCache]:
        memory = torch.zeros(rows, kv_heads, 16, 2 * width, dtype=torch.bfloat16, device=device)
        keys, values = memory.transpose(1, 2).split(width, dim=-1)
        cache = served.PagedCache(keys, values, (one, one), 16 * positions)
        return served.Rope(drawn(rows, width), positions), cache

    def stored(cache: served.PagedCache, k: torch.Tensor, v: torch.Tensor) -> None:
        ops.reshape_and_cache_flash(
            k, v, cache.keys, cache.values, cache.slots, "auto", one, one
        )  # fmt: skip

    heads, kv_heads, width = 32, 4, 128
    qkv, norms = drawn(rows, (heads + 2 * kv_heads) * width), (drawn(width), drawn(width))
    rope, cache = around(kv_heads, width)
    to = served.Queries(torch.bfloat16, one)

    def head_by_head() -> None:
        q, k, v = qkv.split([heads * width, kv_heads * width, kv_heads * width], dim=-1)
        q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=device) for x in (q, k))
        for x, out, weight in ((q, q_out, norms[0]), (k, k_out, norms[1])):
            shape = (rows, -1, width)
            ops.rms_norm(out.view(shape), x.unflatten(1, (-1, width)), weight, _EPS)
        ops.rotary_embedding(rope.positions, q_out, k_out, width, rope.cos_sin, True)
        stored(cache, k_out.unflatten(1, (-1, width)), v.unflatten(1, (-1, width)))

    yield Case(
        "Qwen3-30B-A3B: norms of heads, rotation, cache",
        lambda: served.store_heads(qkv, served.HeadNorms(*norms, _EPS), rope, cache, to),
        "vLLM (4 kernels)",
        head_by_head,
    )
    low, wide = load.q_rank, load.head_dim
    first, q, weight = drawn(rows, low + 2 * wide), drawn(rows, load.heads * wide), drawn(low)
    wide_rope, wide_cache = around(1, wide)

    def low_rank() -> None:
        served.store_low_rank(first, weight, _EPS, wide_rope, wide_cache)
        served.rotate_heads(q, wide, wide_rope, to)

    def by_vllm() -> None:
        below, k, v = first.split([low, wide, wide], dim=-1)
        ops.rms_norm(torch.empty((rows, low), dtype=q.dtype, device=device), below, weight, _EPS)
        ops.rotary_embedding(positions, q, k, wide, wide_rope.cos_sin, True)
        stored(wide_cache, k.unsqueeze(1), v.unsqueeze(1))

    yield Case("Step-3: low-rank norm, rotation, cache", low_rank, "vLLM (3 kernels)", by_vllm)
    for name, hidden in (("Qwen3-30B-A3B", 2048), ("Step-3", load.hidden)):
        x, residual, norm = drawn(rows, hidden), drawn(rows, hidden), drawn(hidden)
        yield Case(
            f"{name}: residual, norm, rows for the FP8 wire",
            partial(served.add_norm_encode, x, residual, norm, _EPS, Tag.E4M3FN),
            "vLLM's norm and our codec (2 kernels)",
            partial(_norm_then_encode, ops, x.clone(), residual.clone(), norm),
        )


def _norm_then_encode(
    ops: ModuleType, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor
) -> object:
    ops.fused_add_rms_norm(x, residual, weight, _EPS)
    return EncodedRows.of(x, Tag.E4M3FN)


def _products(load: Load, device: str, ops: ModuleType) -> Iterator[Case]:
    q = load.heads * load.head_dim
    shapes = (
        (load.q_rank + 2 * load.head_dim, load.hidden),
        (q, load.q_rank),
        (load.hidden, q),
    )
    for n, k in shapes:
        sets = max(2, -(-int(_COLD_BYTES) // (n * k)))
        weights = itertools.cycle(
            [torch.randn(n, k, device=device).to(_FP8).t() for _ in range(sets)]
        )
        codes = torch.randn(load.rows, k, device=device).to(_FP8)
        unit, rows = torch.ones((), device=device), torch.ones(load.rows, 1, device=device)
        columns = torch.ones(1, n, device=device)

        yield Case(
            f"FP8 product {load.rows} x {k} x {n}, cuBLAS, a scale per matrix",
            partial(_cublas, codes, weights, unit),
            "vLLM's, a scale per row and column",
            partial(_cutlass, ops, codes, weights, rows, columns),
        )


def _cublas(codes: torch.Tensor, weights: Iterator[torch.Tensor], unit: torch.Tensor) -> object:
    return torch._scaled_mm(
        codes, next(weights), scale_a=unit, scale_b=unit,
        out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip


def _cutlass(
    ops: ModuleType,
    codes: torch.Tensor,
    weights: Iterator[torch.Tensor],
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> object:
    return ops.cutlass_scaled_mm(codes, next(weights), rows, columns, torch.bfloat16)
