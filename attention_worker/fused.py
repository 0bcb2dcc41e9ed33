"""What stands around the projections and the attention core of a layer in FP8, in few kernels.

vLLM has such fusions as passes of torch.compile (vllm/compilation/passes/fusion: rms_quant_fusion,
rope_kvcache_fusion, the latter on ROCm alone), which its eager layers in an attention instance do
not go through; so these serve where the layer is ours: `afd bench gpu step3`. Every function has a
reference of the same arguments, ``plain_...``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd.wire.codecs import FP8_MAX
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import Tag

_FP8 = {DTYPE_OF_TAG[tag]: FP8_MAX[tag] for tag in (Tag.E4M3FN, Tag.E4M3FNUZ)}
_LEAST_SCALE = 2.0**-100
_HEADS = 8
"""Heads that one program rotates: 8 values per thread at a width of 256."""
_WARPS = 8

Quantised = tuple[torch.Tensor, torch.Tensor]
"""FP8 [rows, columns] and float32 scales [rows, 1]."""


@dataclass(frozen=True)
class Product:
    """codes x weight.T as a library computed it, values float [rows, columns], and its scales, of
    rows float32 [rows, 1] and of columns float32 [columns], which whoever reads it multiplies: a
    library need not know how many there are."""

    values: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    def scaled(self) -> torch.Tensor:
        """float32 [rows, columns]."""
        return self.values.float() * (self.columns * self.rows)


@dataclass(frozen=True)
class Rope:
    """cos_sin: [positions, head_dim], cosines then sines. positions: int64 [rows]."""

    cos_sin: torch.Tensor
    positions: torch.Tensor


@dataclass(frozen=True)
class PagedCache:
    """keys, values: [blocks, page, kv_heads, head_dim], FP8 or the type of the rows, of equal
    strides, a head's columns in a row. scales: of keys and of values, float32 [1]. slots: int64
    [rows], where each row's go; below 0: nowhere."""

    keys: torch.Tensor
    values: torch.Tensor
    scales: tuple[torch.Tensor, torch.Tensor]
    slots: torch.Tensor


def sum_norm_quantise(
    parts: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    fp8: torch.dtype,
) -> Quantised:
    """Adds ``parts`` to the residual, and answers its RMS norm in ``fp8``, a scale per row.

    Args:
        parts: up to 8, float [rows, hidden], each contiguous: the answers of FFN instances where
            they are. residual: [rows, hidden], written. weight: [hidden].
    """
    from afd.wire.slot_gpu_torch import distances
    from attention_worker.kernels.norm import sum_norm_quantise_kernel

    codes, scale = _room(residual, fp8)
    rows, hidden = residual.shape
    sum_norm_quantise_kernel[(rows,)](
        parts[0],
        residual,
        weight,
        codes,
        scale,
        *distances(parts),
        hidden,
        eps,
        MESSAGES=len(parts),
        FP8_MAX=_FP8[fp8],
        BLOCK=_power_of_two(hidden),
        num_warps=_WARPS,
    )
    return codes, scale


def plain_sum_norm_quantise(
    parts: Sequence[torch.Tensor],
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    fp8: torch.dtype,
) -> Quantised:
    x = parts[0].float()
    for part in parts[1:]:
        x = x + part.float()
    x = x + residual.float()
    residual.copy_(x)
    return plain_quantise_rows(_norm(x, weight, eps), fp8)


def norm_store(
    qkv: Product, weight: torch.Tensor, eps: float, rope: Rope, cache: PagedCache, fp8: torch.dtype
) -> Quantised:
    """Of the first projection: keys and values into the cache, keys rotated; answers the RMS norm
    of the queries of low rank in ``fp8``, a scale per row.

    Args:
        qkv: [rows, low + 2 * kv_heads * head_dim], queries, keys, values. weight: [low].
    """
    from attention_worker.kernels.rope_cache import norm_store_kernel

    rows, low = len(qkv.values), len(weight)
    _, page, heads, width = cache.keys.shape
    assert cache.keys.stride() == cache.values.stride() and cache.keys.stride(3) == 1
    codes, scale = _room(qkv.values[:, :low], fp8)
    norm_store_kernel[(rows, 1 + heads)](
        qkv.values,
        qkv.rows,
        qkv.columns,
        weight,
        codes,
        scale,
        rope.cos_sin,
        rope.positions,
        cache.slots,
        cache.keys,
        cache.values,
        *cache.scales,
        low,
        page,
        *cache.keys.stride()[:3],
        heads,
        eps,
        FP8_MAX=_FP8[fp8],
        CACHE_MAX=_FP8.get(cache.keys.dtype, 0.0),
        HALF=_half(width),
        BLOCK=_power_of_two(low),
        num_warps=_WARPS,
    )
    return codes, scale


def plain_norm_store(
    qkv: Product, weight: torch.Tensor, eps: float, rope: Rope, cache: PagedCache, fp8: torch.dtype
) -> Quantised:
    low, (_, page, heads, width) = len(weight), cache.keys.shape
    q, k, v = qkv.scaled().split([low, heads * width, heads * width], dim=-1)
    k, v = _rotated(k.unflatten(1, (heads, width)), rope), v.unflatten(1, (heads, width))
    kept = cache.slots >= 0
    at = cache.slots[kept] // page, cache.slots[kept] % page
    for into, x, scale in zip((cache.keys, cache.values), (k, v), cache.scales, strict=True):
        raw = into.view(torch.uint8) if into.dtype in _FP8 else into
        raw[at] = _converted(x[kept], scale, into.dtype).view(raw.dtype)
    return plain_quantise_rows(_norm(q, weight, eps), fp8)


def rope_quantise(
    q: Product, head_dim: int, rope: Rope, scale: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    """q [rows, heads * head_dim] rotated; as ``kind``, FP8: divided by scale (float32 [1])."""
    from attention_worker.kernels.rope_cache import rope_quantise_kernel

    rows, columns = q.values.shape
    heads = columns // head_dim
    out = torch.empty((rows, columns), dtype=kind, device=q.values.device)
    each = next(n for n in (_HEADS, 4, 2, 1) if heads % n == 0)
    rope_quantise_kernel[(rows, heads // each)](
        q.values,
        q.rows,
        q.columns,
        rope.cos_sin,
        rope.positions,
        out,
        scale,
        heads,
        FP8_MAX=_FP8.get(kind, 0.0),
        HALF=_half(head_dim),
        HEADS=each,
        num_warps=_WARPS,
    )
    return out


def plain_rope_quantise(
    q: Product, head_dim: int, rope: Rope, scale: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    x = _rotated(q.scaled().unflatten(1, (-1, head_dim)), rope)
    return _converted(x.flatten(1), scale, kind)


def quantise_rows(x: torch.Tensor, fp8: torch.dtype) -> Quantised:
    """x [rows, columns], contiguous, in ``fp8``, a scale per row."""
    from attention_worker.kernels.norm import quantise_rows_kernel

    codes, scale = _room(x, fp8)
    rows, columns = x.shape
    quantise_rows_kernel[(rows,)](
        x,
        codes,
        scale,
        columns,
        FP8_MAX=_FP8[fp8],
        BLOCK=_power_of_two(columns),
        num_warps=_WARPS,
    )
    return codes, scale


def plain_quantise_rows(x: torch.Tensor, fp8: torch.dtype) -> Quantised:
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / _FP8[fp8]).clamp(min=_LEAST_SCALE)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    return (x / scale).clamp(-_FP8[fp8], _FP8[fp8]).to(fp8), scale


def add_norm(
    product: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds the product to the residual, and answers its RMS norm in the residual's type.

    Args:
        residual: [rows, hidden], written. weight: [hidden].
    """
    from attention_worker.kernels.norm import add_norm_kernel

    out = torch.empty_like(residual)
    rows, hidden = residual.shape
    add_norm_kernel[(rows,)](
        product.values,
        product.rows,
        product.columns,
        residual,
        weight,
        out,
        hidden,
        eps,
        BLOCK=_power_of_two(hidden),
        num_warps=_WARPS,
    )
    return out


def plain_add_norm(
    product: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    x = residual.float() + product.scaled()
    residual.copy_(x)
    return _norm(x, weight, eps).to(residual.dtype)


def _rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
    """x: float32 [rows, heads, head_dim]."""
    cos, sin = rope.cos_sin[rope.positions].float()[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _converted(x: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    if kind not in _FP8:
        return x.to(kind)
    return (x / scale).clamp(-_FP8[kind], _FP8[kind]).to(kind)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: float32 [rows, columns]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _room(like: torch.Tensor, fp8: torch.dtype) -> Quantised:
    return (
        torch.empty(like.shape, dtype=fp8, device=like.device),
        torch.empty((len(like), 1), dtype=torch.float32, device=like.device),
    )


def _half(width: int) -> int:
    assert width == _power_of_two(width), "the kernels rotate heads of a power of two columns"
    return width // 2


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
