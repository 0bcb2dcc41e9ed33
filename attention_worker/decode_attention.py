"""Attention of one query token per request over a paged cache: the kernels and their reference.

Made for many query heads on one key/value head (Step-3's multi-matrix factorisation attention: 64
heads on one of 256), where a key that is read once serves all of them.
"""

import torch

from attention_worker.decode_plan import DecodePlan

_FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    softmax_scale: float,
    plan: DecodePlan,
    q_scale: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> torch.Tensor:
    """Writes and answers ``out``: one launch, two where the plan splits. Nothing is read on the
    host, so a captured graph may replay it with other lengths and pages.

    Args:
        q: [requests, heads, dim] of the cache's type, heads contiguous.
        keys, values: FP8, bfloat16 or float16 [pages, page, kv_heads, dim], dim contiguous, with
            equal strides.
        table: int32 [requests, pages of a request]. lengths: int32 [requests]; 0 gives zeros.
        out: [requests, heads, dim], contiguous, of 16 bits.
        q_scale, k_scale, v_scale: float32, one element; read where the cache is FP8.
    """
    # Imported here: CPU builds of torch come without triton, and the reference needs none.
    import triton
    import triton.language as tl

    from attention_worker.kernels import decode as kernels

    requests, heads, dim = q.shape
    _, page, kv_heads, _ = keys.shape
    if not requests:
        return out
    scaled = keys.dtype in _FP8
    part, lse = out, k_scale
    if plan.splits > 1:
        # A part is an average of codes: those of FP8 fit float16.
        kind = torch.float16 if scaled else torch.float32
        part = torch.empty((requests, heads, plan.splits, dim), dtype=kind, device=q.device)
        lse = torch.empty((requests, heads, plan.splits), device=q.device)
    group = heads // kv_heads
    kernels.decode_kernel[(plan.splits, kv_heads * triton.cdiv(group, plan.block), requests)](
        q,
        keys,
        values,
        table,
        lengths,
        q_scale,
        k_scale,
        v_scale,
        part,
        lse,
        softmax_scale,
        q.stride(0),
        table.stride(0),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        plan.splits,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        BLOCK=plan.block,
        TILE=plan.tile,
        PAGE=page,
        SPLIT=plan.splits > 1,
        P=tl.bfloat16 if keys.dtype == torch.bfloat16 else tl.float16,
        STAGES=plan.stages,
        num_warps=plan.warps,
    )
    if plan.splits > 1:
        rows, lanes = requests * heads, triton.next_power_of_2(plan.splits)
        block = max(1, 16 // lanes)
        kernels.combine_kernel[(triton.cdiv(rows, block),)](
            part,
            lse,
            v_scale,
            out,
            rows,
            plan.splits,
            DIM=dim,
            LANES=lanes,
            BLOCK=block,
            SCALED=scaled,
            num_warps=4,
        )
    return out


def reference_decode_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    softmax_scale: float,
    q_scale: float = 1.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> torch.Tensor:
    """The same in float32, request by request: [requests, heads, dim]. q is taken as it is."""
    requests, heads, dim = q.shape
    page, kv_heads = keys.shape[1:3]
    out = torch.zeros(requests, heads, dim, device=q.device)
    grouped = q.float().view(requests, kv_heads, heads // kv_heads, dim) * q_scale
    for request, length in enumerate(lengths.tolist()):
        if not length:
            continue
        pages = table[request, : -(-length // page)].long()
        k, v = (
            (cache[pages].flatten(0, 1)[:length].float() * scale).transpose(0, 1)
            for cache, scale in ((keys, k_scale), (values, v_scale))
        )
        scores = grouped[request] @ k.transpose(1, 2) * softmax_scale
        out[request] = (scores.softmax(-1) @ v).flatten(0, 1)
    return out
