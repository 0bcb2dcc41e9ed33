"""Decode attention over a paged KV cache: launches the kernels, and holds their reference.

Made for many query heads per key/value head, where one read of a key serves all of them. Example:
Step-3's multi-matrix factorisation attention has 64 query heads on one key/value head of size 256.
"""

import torch

from attention_worker.kernels.decode_plan import DecodePlan

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
    """Writes the attention output to ``out`` and returns it.

    One launch, or two if the plan splits. The host reads no tensor, so a captured graph may be
    replayed with other lengths and pages.

    Args:
        q: [requests, heads, dim], dtype of the cache, heads contiguous.
        keys, values: FP8, bfloat16 or float16 [pages, page, kv_heads, dim], dim contiguous, equal
            strides.
        table: int32 [requests, pages of a request], page numbers.
        lengths: int32 [requests], tokens in the cache; 0 gives zeros.
        out: bfloat16 or float16 [requests, heads, dim], contiguous.
        q_scale, k_scale, v_scale: float32, one element each; read if the cache is FP8.
    """
    # Imported late: CPU builds of torch lack triton, and the reference does not need it.
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
        # A part is an average of FP8 codes, and these fit float16.
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
    """Returns the same in float32 [requests, heads, dim], computed request by request.

    q: any float dtype; it is not quantised first.
    """
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
