"""Fused kernels around FP8 products whose scales the reader multiplies.

Only `afd bench gpu step3` and `afd bench gpu fused` use them: vLLM's linear layers return scaled
products. The kernels of servers are in :mod:`attention_worker.kernels.fused_attention`. Every
function has a reference with the same arguments, ``plain_...``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from attention_worker.kernels.fused_attention import (
    FP8_LIMIT,
    PagedCache,
    Rope,
    half_of,
    plain_converted,
    plain_norm,
    plain_rotated,
    plain_store,
    power_of_two,
)

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
        FP8_MAX=FP8_LIMIT[fp8],
        BLOCK=power_of_two(hidden),
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
    return plain_quantise_rows(plain_norm(x, weight, eps), fp8)


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
        FP8_MAX=FP8_LIMIT[fp8],
        CACHE_MAX=FP8_LIMIT.get(cache.keys.dtype, 0.0),
        HALF=half_of(width),
        BLOCK=power_of_two(low),
        num_warps=_WARPS,
    )
    return codes, scale


def plain_norm_store(
    qkv: Product, weight: torch.Tensor, eps: float, rope: Rope, cache: PagedCache, fp8: torch.dtype
) -> Quantised:
    low, (heads, width) = len(weight), cache.keys.shape[2:]
    q, k, v = qkv.scaled().split([low, heads * width, heads * width], dim=-1)
    k = plain_rotated(k.unflatten(1, (heads, width)), rope)
    plain_store(cache, k, v.unflatten(1, (heads, width)))
    return plain_quantise_rows(plain_norm(q, weight, eps), fp8)


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
        FP8_MAX=FP8_LIMIT.get(kind, 0.0),
        HALF=half_of(head_dim),
        HEADS=each,
        num_warps=_WARPS,
    )
    return out


def plain_rope_quantise(
    q: Product, head_dim: int, rope: Rope, scale: torch.Tensor, kind: torch.dtype
) -> torch.Tensor:
    x = plain_rotated(q.scaled().unflatten(1, (-1, head_dim)), rope)
    return plain_converted(x.flatten(1), scale, kind)


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
        FP8_MAX=FP8_LIMIT[fp8],
        BLOCK=power_of_two(columns),
        num_warps=_WARPS,
    )
    return codes, scale


def plain_quantise_rows(x: torch.Tensor, fp8: torch.dtype) -> Quantised:
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    scale = (amax / FP8_LIMIT[fp8]).clamp(min=_LEAST_SCALE)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    return (x / scale).clamp(-FP8_LIMIT[fp8], FP8_LIMIT[fp8]).to(fp8), scale


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
        BLOCK=power_of_two(hidden),
        num_warps=_WARPS,
    )
    return out


def plain_add_norm(
    product: Product, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    x = residual.float() + product.scaled()
    residual.copy_(x)
    return plain_norm(x, weight, eps).to(residual.dtype)


def _room(like: torch.Tensor, fp8: torch.dtype) -> Quantised:
    return (
        torch.empty(like.shape, dtype=fp8, device=like.device),
        torch.empty((len(like), 1), dtype=torch.float32, device=like.device),
    )
