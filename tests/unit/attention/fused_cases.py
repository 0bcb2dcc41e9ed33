"""Random inputs of the fused attention kernels (attention_worker/kernels/fused_attention.py)."""

from dataclasses import replace

import torch

from attention_worker.kernels import fused_attention as fused

PAGE = 16


def heads_case(device, kind, q_heads=6, kv_heads=2, width=64, rows=11, dtype=torch.bfloat16):
    """Returns (qkv, norms, rope, cache, queries). The last two rows have no slot, row 3 has -1."""
    draw = torch.Generator().manual_seed(q_heads + rows)

    def drawn(*shape):
        return torch.randn(shape, generator=draw).to(dtype).to(device)

    qkv = drawn(rows, (q_heads + 2 * kv_heads) * width)
    norms = fused.HeadNorms(drawn(width), drawn(width), 1e-6)
    return qkv, norms, *_around(drawn, draw, device, kind, kv_heads, width, rows, dtype)


def low_rank_case(device, kind, low=96, kv_heads=1, width=64, rows=11, dtype=torch.bfloat16):
    """Returns (qkv, weight, rope, cache, queries)."""
    draw = torch.Generator().manual_seed(low + rows)

    def drawn(*shape):
        return torch.randn(shape, generator=draw).to(dtype).to(device)

    qkv = drawn(rows, low + 2 * kv_heads * width)
    return qkv, drawn(low), *_around(drawn, draw, device, kind, kv_heads, width, rows, dtype)


def _around(drawn, draw, device, kind, kv_heads, width, rows, dtype):
    angle = 6 * torch.rand(40, width // 2, generator=draw)
    table = torch.cat([angle.cos(), angle.sin()], -1).to(dtype).to(device)
    # A slice that starts at an odd row, as those of a micro-batch may.
    positions = torch.randint(0, 40, (rows + 1,), generator=draw).to(device)[1:]
    blocks = -(-rows // PAGE) + 1
    slots = torch.randperm(blocks * PAGE, generator=draw)[: rows - 1].to(device)[1:]
    slots[3] = -1
    # As vLLM lays a cache out: keys and values of a head beside each other.
    memory = torch.zeros(blocks, kv_heads, PAGE, 2 * width, dtype=kind, device=device)
    keys, values = memory.transpose(1, 2).split(width, dim=-1)
    scales = tuple(torch.tensor([s], device=device) for s in (0.5, 0.25))
    cache = fused.PagedCache(keys, values, scales, slots)
    to = kind if kind in fused.FP8_LIMIT else dtype
    queries = fused.Queries(to, torch.tensor([0.125], device=device))
    return fused.Rope(table, positions), cache, queries


def empty(cache):
    """Returns a cache of the same form without content."""
    memory = torch.zeros_like(torch.cat([cache.keys, cache.values], -1).view(torch.uint8))
    memory = memory.view(cache.keys.dtype)
    keys, values = memory.split(cache.keys.shape[-1], dim=-1)
    return replace(cache, keys=keys, values=values)


def assert_close(mine, theirs):
    """float32: equal up to its rounding. Else at most 2% of the values differ, each by at most one
    step of the dtype."""
    assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
    if mine.dtype == torch.float32:
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        return
    difference = (mine.float() - theirs.float()).abs()
    step = 2**-3 if mine.dtype in fused.FP8_LIMIT else 2**-7
    assert (difference <= theirs.float().abs() * step + 2**-6).all()
    assert (difference > 0).float().mean() < 0.02


def check_heads(device, kind, **sizes):
    qkv, norms, rope, cache, queries = heads_case(device, kind, **sizes)
    again = empty(cache)
    got = fused.store_heads(qkv, norms, rope, cache, queries)
    assert_close(got, fused.plain_store_heads(qkv, norms, rope, again, queries))
    check_cache(cache, again)


def check_low_rank(device, kind, **sizes):
    qkv, weight, rope, cache, queries = low_rank_case(device, kind, **sizes)
    again = empty(cache)
    got = fused.store_low_rank(qkv, weight, 1e-5, rope, cache)
    assert_close(got, fused.plain_store_low_rank(qkv, weight, 1e-5, rope, again))
    check_cache(cache, again)
    width = cache.keys.shape[-1]
    q = qkv[:, : qkv.shape[1] // width * width].contiguous()
    got = fused.rotate_heads(q, width, rope, queries)
    assert_close(got, fused.plain_rotate_heads(q, width, rope, queries))


def check_cache(mine, theirs):
    assert_close(mine.keys, theirs.keys)
    assert_close(mine.values, theirs.values)
    written = (theirs.values.float() != 0).flatten(2).any(-1).sum()
    assert written == (theirs.slots >= 0).sum()


def check_encoding(device, tag, rows=5, hidden=384, dtype=torch.bfloat16, codes=True):
    draw = torch.Generator().manual_seed(0)
    x, residual, weight = (
        torch.randn(shape, generator=draw).to(dtype).to(device)
        for shape in ((rows, hidden), (rows, hidden), (hidden,))
    )
    again = residual.clone()
    got, encoded = fused.add_norm_encode(x, residual, weight, 1e-6, tag)
    want, _ = fused.plain_add_norm_encode(x, again, weight, 1e-6, tag)
    assert torch.equal(residual, again)
    assert_close(got, want)
    assert len(encoded) == rows and encoded.tag == tag
    # Codes and scales are those of the rows that the router sees, byte for byte.
    exact = fused.EncodedRows.of(got.cpu(), tag)
    assert torch.equal(encoded.scales.cpu(), exact.scales)
    if codes:
        assert torch.equal(encoded.payload.cpu().view(torch.uint8), exact.payload.view(torch.uint8))
