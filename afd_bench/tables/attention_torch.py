"""Times decode attention on one device with the kernel that serves the cell: vLLM's, or ours.

- "gqa" with heads of 256 and an FP8 cache (Step-3): this project's kernel.
- other "gqa": FlashAttention 3.
- "mla" in bfloat16: FlashAttention 3 with latent values, vLLM's choice on Hopper.
- "mla" in FP8: FlashMLA.

On a CPU a reference in float32, which checks the path and nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from afd_bench.moe.timing import cpu_clock, graph_seconds
from afd_bench.tables.cells import AttentionCell, MixedCell
from attention_worker.kernels.decode_attention import decode_attention, reference_decode_attention
from attention_worker.kernels.decode_plan import plan_decode

PAGE = 64
_L2_BYTES = 160 << 20
_LAUNCHES = 8
_OURS = 256  # head_dim of Step-3
_DRAWS = 3
_SPLITS = 32  # vLLM's flash_attn_max_num_splits_for_cuda_graph

Launch = Callable[[int], object]


def attention_us(cell: AttentionCell, device: str) -> float:
    """Returns microseconds of one launch, replayed from a graph (on a CPU: of one call). Of mixed
    lengths: the mean over several draws."""
    draws = _DRAWS if isinstance(cell, MixedCell) else 1
    return statistics.fmean(_launch_us(cell, device, seed) for seed in range(draws))


def lengths_of(cell: AttentionCell, seed: int) -> torch.Tensor:
    """Returns the tokens of each request, int32 [rows] on the CPU; their mean is the context."""
    if not isinstance(cell, MixedCell):
        return torch.full((cell.rows,), cell.context, dtype=torch.int32)
    share = 0.5 + torch.rand(cell.rows, generator=torch.Generator().manual_seed(seed))
    return (share / share.mean() * cell.context).int().clamp(min=1)


def _launch_us(cell: AttentionCell, device: str, seed: int) -> float:
    caches = _Caches(cell, device, lengths_of(cell, seed))
    if device == "cpu":
        return 1e6 * cpu_clock(caches.reference, 1)
    count = max(_LAUNCHES, len(caches.each))
    return 1e6 * graph_seconds(_launch(cell, caches), count, 1)


class _Caches:
    """Several random caches of the same requests, used in turn; together larger than an L2 cache.

    ``each``: [pages, PAGE, kv_heads, width] in vLLM's layout, with a token's key and value adjacent
    (MLA: one row). Pages are in random order.
    """

    def __init__(self, cell: AttentionCell, device: str, lengths: torch.Tensor) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.lengths, self.longest = lengths.to(device), int(lengths.max())
        per = -(-self.longest // PAGE)
        width = cell.head_dim if cell.kind == "mla" else 2 * cell.head_dim
        shape = (cell.rows * per, PAGE, cell.kv_heads, width)
        least = _L2_BYTES if device != "cpu" else 0
        self.fp8 = cell.cache == "fp8"
        self.each = [
            self._random(shape, device, generator)
            for _ in range(max(1, min(64, -(-least // max(1, int(cell.cache_bytes))))))
        ]
        order = torch.randperm(cell.rows * per, generator=generator, device=device)
        self.table = order.int().view(cell.rows, per)
        draw = torch.randn(cell.rows, cell.heads, cell.head_dim, generator=generator, device=device)
        self.q = draw.to(torch.float8_e4m3fn if self.fp8 else torch.bfloat16)
        out = (cell.rows, cell.heads, cell.value_dim)
        self.out = torch.empty(out, dtype=torch.bfloat16, device=device)
        self.one = torch.ones(1, device=device)
        self.starts = torch.arange(cell.rows + 1, dtype=torch.int32, device=device)
        self.scale = cell.head_dim**-0.5
        self.cell = cell

    def _random(
        self, shape: tuple[int, ...], device: str, generator: torch.Generator
    ) -> torch.Tensor:
        if not self.fp8:
            codes = torch.empty(shape, dtype=torch.int16, device=device)
            # The mask leaves numbers from 2**-15 to below 2; arbitrary codes would include NaN.
            codes.random_(-(2**15), 2**15, generator=generator).bitwise_and_(-0x4001)
            return codes.bitwise_or_(0x3800).view(torch.bfloat16)
        codes8 = torch.empty(shape, dtype=torch.uint8, device=device)
        codes8.random_(0, 256, generator=generator).bitwise_and_(0xB7)
        return codes8.view(torch.float8_e4m3fn)

    def turn(self, number: int) -> torch.Tensor:
        return self.each[number % len(self.each)]

    def pair(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a cache that is not latent."""
        keys, values = self.turn(number).split(self.cell.head_dim, -1)
        return keys, values

    def reference(self) -> torch.Tensor:
        if self.cell.kind == "mla":
            rows = self.turn(0)[self.table.long()].flatten(1, 2).float()[:, : self.longest, 0]
            scores = self.q.float() @ rows.mT * self.scale
            beyond = torch.arange(self.longest, device=scores.device) >= self.lengths[:, None]
            weights = torch.softmax(scores.masked_fill(beyond[:, None], -torch.inf), -1)
            return weights @ rows[..., : self.cell.value_dim]
        keys, values = self.pair(0)
        return reference_decode_attention(
            self.q, keys, values, self.table, self.lengths, self.scale
        )


def _launch(cell: AttentionCell, caches: _Caches) -> Launch:
    if cell.kind == "mla":
        return _flash_mla(cell, caches) if caches.fp8 else _flash_latent(caches)
    if cell.head_dim == _OURS and cell.kv_heads == 1 and caches.fp8:
        return _ours(cell, caches)
    return _flash(caches)


def _ours(cell: AttentionCell, caches: _Caches) -> Launch:
    processors = torch.cuda.get_device_properties(caches.q.device).multi_processor_count
    plan = plan_decode(cell.rows, 1, cell.heads, cell.head_dim, 1, processors)
    one = caches.one

    def launch(number: int) -> None:
        keys, values = caches.pair(number)
        decode_attention(
            caches.q, keys, values, caches.table, caches.lengths, caches.out, caches.scale, plan,
            one, one, one,
        )  # fmt: skip

    return launch


def _flash(caches: _Caches) -> Launch:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    cell, scales = caches.cell, {}
    if caches.fp8:
        ones = caches.one.expand(cell.rows, cell.kv_heads)
        scales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    arguments = _flash_arguments(caches, cell.head_dim, cell.head_dim)

    def launch(number: int) -> None:
        keys, values = caches.pair(number)
        flash_attn_varlen_func(caches.q, keys, values, out=caches.out, **arguments, **scales)

    return launch


def _flash_arguments(caches: _Caches, key_dim: int, value_dim: int) -> dict[str, object]:
    """Returns what vLLM calls FlashAttention 3 with in a decode graph, whose work it divides before
    (vllm/v1/attention/backends/flash_attn.py and mla/flashattn_mla.py: get_scheduler_metadata)."""
    from vllm.vllm_flash_attn.flash_attn_interface import get_scheduler_metadata

    plan = get_scheduler_metadata(
        batch_size=caches.cell.rows, max_seqlen_q=1, max_seqlen_k=caches.longest,
        num_heads_q=caches.cell.heads, num_heads_kv=caches.cell.kv_heads, headdim=key_dim,
        headdim_v=value_dim, cache_seqlens=caches.lengths, qkv_dtype=caches.q.dtype,
        cu_seqlens_q=caches.starts, page_size=PAGE, causal=True, num_splits=_SPLITS,
    )  # fmt: skip
    return {
        "max_seqlen_q": 1, "cu_seqlens_q": caches.starts, "max_seqlen_k": caches.longest,
        "seqused_k": caches.lengths, "block_table": caches.table, "softmax_scale": caches.scale,
        "causal": True, "fa_version": 3, "scheduler_metadata": plan, "num_splits": _SPLITS,
    }  # fmt: skip


def _flash_latent(caches: _Caches) -> Launch:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    rank = caches.cell.value_dim
    latent, rope = caches.q[..., :rank].contiguous(), caches.q[..., rank:].contiguous()
    arguments = _flash_arguments(caches, rope.shape[-1], rank)

    def launch(number: int) -> None:
        rows = caches.turn(number)
        flash_attn_varlen_func(
            q=rope, k=rows[..., rank:], v=rows[..., :rank], q_v=latent, **arguments
        )

    return launch


def _flash_mla(cell: AttentionCell, caches: _Caches) -> Launch:
    from vllm.v1.attention.ops.flashmla import (
        flash_mla_with_kvcache_fp8,
        get_mla_metadata_dense_fp8,
    )

    plan, splits = get_mla_metadata_dense_fp8(caches.lengths, cell.heads, 1)
    q = caches.q.unsqueeze(1)

    def launch(number: int) -> None:
        flash_mla_with_kvcache_fp8(
            q=q, k_cache=caches.turn(number), block_table=caches.table,
            cache_seqlens=caches.lengths, head_dim_v=cell.value_dim, tile_scheduler_metadata=plan,
            num_splits=splits, softmax_scale=caches.scale, causal=True,
            descale_q=caches.one, descale_k=caches.one,
        )  # fmt: skip

    return launch
