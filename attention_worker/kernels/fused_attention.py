"""Fused parts of an attention half, for everything but projections and attention core.

They replace vLLM's norms, rotary embedding, query quantisation, cache write and our FP8 encoding by
one kernel each (:mod:`attention_worker.kernels.fused`). vLLM has such fusions as passes of
torch.compile (vllm/compilation/passes/fusion), which do not run in an attention instance: our
pipeline replaces the loop that vLLM compiles. Every function has a reference with the same
arguments, ``plain_...``. Imports Triton only when a kernel is launched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from afd.wire import codecs_torch
from afd.wire.codecs import FP8_MAX
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows

FP8_LIMIT = {DTYPE_OF_TAG[tag]: FP8_MAX[tag] for tag in (Tag.E4M3FN, Tag.E4M3FNUZ)}
"""Largest number of each FP8 dtype."""
_WARPS = 8


@dataclass(frozen=True)
class Rope:
    """cos_sin: [positions, head_dim], cosines then sines. positions: int64 [rows]."""

    cos_sin: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class PagedCache:
    """A paged KV cache and the slots to write.

    keys, values: [blocks, page, kv_heads, head_dim], FP8 or the dtype of the rows, with equal
    strides and contiguous head columns. scales: of keys and of values, float32 [1]. slots: int64
    [at most the rows], the target slot of each row; a negative slot stores nothing, nor does a row
    without a slot.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor

    def strides(self) -> tuple[int, int, int, int]:
        """Returns the tokens per block, and the strides of a block, a token and a head."""
        block, token, head, column = self.keys.stride()
        assert self.keys.stride() == self.values.stride() and column == 1
        return self.keys.shape[1], block, token, head


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of single heads: weights [head_dim] of queries and of keys."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Queries:
    """How queries are handed to the attention core: their dtype; FP8 is divided by ``scale``,
    float32 [1]."""

    dtype: torch.dtype
    scale: torch.Tensor


def store_heads(
    qkv: torch.Tensor, norms: HeadNorms, rope: Rope, cache: PagedCache, to: Queries
) -> torch.Tensor:
    """Normalises and rotates every head of queries and keys; writes keys and values to the cache.

    Args:
        qkv: [rows, (q_heads + 2 * kv_heads) * head_dim]: queries, keys, values.

    Returns:
        the queries, ``to.dtype`` [rows, q_heads * head_dim].
    """
    kv_heads, width = cache.keys.shape[2:]
    q_heads = qkv.shape[1] // width - 2 * kv_heads
    return _launch_heads(qkv, norms, rope, cache, to, q_heads, kv_heads, width)


def plain_store_heads(
    qkv: torch.Tensor, norms: HeadNorms, rope: Rope, cache: PagedCache, to: Queries
) -> torch.Tensor:
    kv_heads, width = cache.keys.shape[2:]
    heads = qkv.float().unflatten(1, (-1, width))
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    plain_store(cache, plain_rotated(plain_norm(k, norms.k, norms.eps), rope), v)
    q = plain_rotated(plain_norm(q, norms.q, norms.eps), rope)
    return plain_converted(q.flatten(1), to.scale, to.dtype)


def rotate_heads(q: torch.Tensor, width: int, rope: Rope, to: Queries) -> torch.Tensor:
    """Returns q [rows, heads * width] rotated, in ``to.dtype``."""
    return _launch_heads(q, None, rope, None, to, q.shape[1] // width, 0, width)


def plain_rotate_heads(q: torch.Tensor, width: int, rope: Rope, to: Queries) -> torch.Tensor:
    x = plain_rotated(q.float().unflatten(1, (-1, width)), rope)
    return plain_converted(x.flatten(1), to.scale, to.dtype)


def _launch_heads(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rope: Rope,
    cache: PagedCache | None,
    to: Queries,
    q_heads: int,
    kv_heads: int,
    width: int,
) -> torch.Tensor:
    from attention_worker.kernels.fused import heads_kernel

    rows = len(qkv)
    out = torch.empty((rows, q_heads * width), dtype=to.dtype, device=qkv.device)
    if not rows:
        return out
    # Arguments that a variant does not read are any tensor of a fitting type.
    q_weight, k_weight = (qkv, qkv) if norms is None else (norms.q, norms.k)
    keys, values, slots, scales = (
        (qkv, qkv, rope.positions, (to.scale, to.scale))
        if cache is None
        else (cache.keys, cache.values, cache.slots, cache.scales)
    )
    heads_kernel[(rows, q_heads + kv_heads)](
        qkv,
        q_weight,
        k_weight,
        rope.cos_sin,
        rope.positions,
        slots,
        out,
        keys,
        values,
        to.scale,
        *scales,
        qkv.stride(0),
        q_heads,
        kv_heads,
        *((1, 0, 0, 0) if cache is None else cache.strides()),
        0 if cache is None else len(cache.slots),
        0.0 if norms is None else norms.eps,
        Q_MAX=FP8_LIMIT.get(to.dtype, 0.0),
        CACHE_MAX=FP8_LIMIT.get(keys.dtype, 0.0),
        HALF=half_of(width),
        NORMED=norms is not None,
        num_warps=1,  # a program has one head
    )
    return out


def store_low_rank(
    qkv: torch.Tensor, weight: torch.Tensor, eps: float, rope: Rope, cache: PagedCache
) -> torch.Tensor:
    """Writes rotated keys, and values, to the cache.

    Args:
        qkv: [rows, low + 2 * kv_heads * head_dim]: queries of low rank, keys, values.
        weight: [low].

    Returns:
        the RMS norm of the queries, dtype of ``qkv`` [rows, low].
    """
    from attention_worker.kernels.fused import low_rank_kernel

    rows, low = len(qkv), len(weight)
    kv_heads, width = cache.keys.shape[2:]
    out = torch.empty((rows, low), dtype=qkv.dtype, device=qkv.device)
    if rows:
        low_rank_kernel[(rows, 1 + kv_heads)](
            qkv,
            weight,
            rope.cos_sin,
            rope.positions,
            cache.slots,
            out,
            cache.keys,
            cache.values,
            *cache.scales,
            qkv.stride(0),
            low,
            kv_heads,
            *cache.strides(),
            len(cache.slots),
            eps,
            CACHE_MAX=FP8_LIMIT.get(cache.keys.dtype, 0.0),
            HALF=half_of(width),
            BLOCK=power_of_two(low),
        )
    return out


def plain_store_low_rank(
    qkv: torch.Tensor, weight: torch.Tensor, eps: float, rope: Rope, cache: PagedCache
) -> torch.Tensor:
    low, (heads, width) = len(weight), cache.keys.shape[2:]
    q, k, v = qkv.float().split([low, heads * width, heads * width], dim=-1)
    k = plain_rotated(k.unflatten(1, (heads, width)), rope)
    plain_store(cache, k, v.unflatten(1, (heads, width)))
    return plain_norm(q, weight, eps).to(qkv.dtype)


def add_norm_encode(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, tag: Tag
) -> tuple[torch.Tensor, EncodedRows]:
    """Adds x [rows, hidden] to the residual, in place.

    Args:
        residual: contiguous [rows, hidden]. weight: [hidden]; hidden is a multiple of 128.
        tag: an FP8 format of the wire.

    Returns:
        the RMS norm of the residual, in its dtype, and the same rows encoded.
    """
    from attention_worker.kernels.fused import add_norm_encode_kernel

    rows, hidden = residual.shape
    out, groups = torch.empty_like(residual), hidden // SCALE_BLOCK
    codes = torch.empty((rows, hidden), dtype=DTYPE_OF_TAG[tag], device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    if rows:
        add_norm_encode_kernel[(rows,)](
            x,
            residual,
            weight,
            out,
            codes,
            scales,
            hidden,
            x.stride(0),
            eps,
            FP8_MAX=FP8_MAX[tag],
            GROUP=SCALE_BLOCK,
            GROUPS=power_of_two(groups),
            num_warps=_WARPS,
        )
    return out, EncodedRows(tag, codes, scales)


def plain_add_norm_encode(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, tag: Tag
) -> tuple[torch.Tensor, EncodedRows]:
    residual.copy_(residual.float() + x.float())
    out = plain_norm(residual.float(), weight, eps).to(residual.dtype)
    return out, EncodedRows(tag, *codecs_torch.encode(out, tag))


def plain_store(cache: PagedCache, k: torch.Tensor, v: torch.Tensor) -> None:
    """Writes k and v, float32 [rows, kv_heads, head_dim], to the cache."""
    page, kept = cache.keys.shape[1], cache.slots >= 0
    slots, stored = cache.slots[kept], len(cache.slots)
    for into, x, scale in zip((cache.keys, cache.values), (k, v), cache.scales, strict=True):
        raw = into.view(torch.uint8) if into.dtype in FP8_LIMIT else into
        codes = plain_converted(x[:stored][kept], scale, into.dtype)
        raw[slots // page, slots % page] = codes.view(raw.dtype)


def plain_rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Rotates x, float32 [rows, heads, head_dim]."""
    cos, sin = rope.cos_sin[rope.positions].float()[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def plain_converted(x: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Returns x in dtype ``kind``; FP8 is divided by ``scale`` and saturates."""
    if kind not in FP8_LIMIT:
        return x.to(kind)
    return (x / scale).clamp(-FP8_LIMIT[kind], FP8_LIMIT[kind]).to(kind)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMS norm of x, float32 [.., columns]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def half_of(width: int) -> int:
    """Returns half of the width of a head, which must be a power of two."""
    assert width == power_of_two(width), "head_dim must be a power of two"
    return width // 2


def power_of_two(size: int) -> int:
    """Returns the least power of two that is not below ``size``."""
    return 1 << (size - 1).bit_length()
