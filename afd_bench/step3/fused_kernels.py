"""Fused kernels of an FP8 attention layer, for everything but projections and attention core.

Only `afd bench gpu step3` and `afd bench gpu fused` use them. vLLM has such fusions as passes of
torch.compile (vllm/compilation/passes/fusion: rms_quant_fusion; rope_kvcache_fusion on ROCm only),
which do not apply to the eager layers of an attention instance. Every function has a reference with
the same arguments, ``plain_...``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from afd.wire.codecs import FP8_MAX
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import Tag

_FP8 = {DTYPE_OF_TAG[tag]: FP8_MAX[tag] for tag in (Tag.E4M3FN, Tag.E4M3FNUZ)}
_LEAST_SCALE = 2.0**-100
_HEADS = 8
"""Most heads that one program rotates: 8 values per thread for heads of 256 columns."""
_WARPS = 8

Quantised = tuple[torch.Tensor, torch.Tensor]
"""FP8 [rows, columns] and float32 scales [rows, 1]."""


@dataclass(frozen=True)
class Product:
    """codes x weight.T without scales, as a library computes it, and the scales.

    values: float [rows, columns]. rows: float32 [rows, 1]. columns: float32 [columns]. The reader
    multiplies the scales, so that any library's product with one scale per matrix can be used.
    """

    values: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    def scaled(self) -> torch.Tensor:
        """Returns the scaled product, float32 [rows, columns]."""
        return self.values.float() * (self.columns * self.rows)


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
    [rows], the target slot of each row; a negative slot stores nothing.
    """

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
    """Adds ``parts`` to the residual; returns its RMS norm in ``fp8`` with a scale per row.

    Args:
        parts: up to 8 contiguous float [rows, hidden]: answers of FFN instances, read in place.
        residual: [rows, hidden], updated in place. weight: [hidden].
    """
    from afd.wire.slot_gpu_torch import distances
    from afd_bench.step3.kernel_norm import sum_norm_quantise_kernel

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
    """Writes rotated keys and values to the cache; returns the RMS norm of the low-rank queries.

    Args:
        qkv: first projection [rows, low + 2 * kv_heads * head_dim]: queries, keys, values.
        weight: [low].

    Returns:
        The normalised queries in ``fp8`` with a scale per row.
    """
    from afd_bench.step3.kernel_rope_cache import norm_store_kernel

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
    """Returns q [rows, heads * head_dim] rotated, in dtype ``kind``.

    scale: float32 [1]; FP8 results are divided by it.
    """
    from afd_bench.step3.kernel_rope_cache import rope_quantise_kernel

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
    """Quantises contiguous x [rows, columns] to ``fp8`` with a scale per row."""
    from afd_bench.step3.kernel_norm import quantise_rows_kernel

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
    """Adds the product to the residual; returns its RMS norm in the residual's dtype.

    residual: [rows, hidden], updated in place. weight: [hidden].
    """
    from afd_bench.step3.kernel_norm import add_norm_kernel

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
    """Rotates x, float32 [rows, heads, head_dim]."""
    cos, sin = rope.cos_sin[rope.positions].float()[:, None].chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _converted(x: torch.Tensor, scale: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    if kind not in _FP8:
        return x.to(kind)
    return (x / scale).clamp(-_FP8[kind], _FP8[kind]).to(kind)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Returns the RMS norm of x, float32 [rows, columns]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _room(like: torch.Tensor, fp8: torch.dtype) -> Quantised:
    return (
        torch.empty(like.shape, dtype=fp8, device=like.device),
        torch.empty((len(like), 1), dtype=torch.float32, device=like.device),
    )


def _half(width: int) -> int:
    assert width == _power_of_two(width), "head_dim must be a power of two"
    return width // 2


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
