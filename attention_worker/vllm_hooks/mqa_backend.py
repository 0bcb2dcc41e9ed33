"""vLLM's FlashAttention backend, with our kernel for decode steps on an FP8 cache.

``attention.kernel: mqa`` registers it as vLLM's ``CUSTOM`` backend. FlashAttention keeps metadata,
cache layout, cache writes, prefill and every step that :mod:`attention_worker.kernels.mqa` does not
accept (vllm/v1/attention/backends/flash_attn.py, 0.26.0).
"""

from functools import cache

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionLayer
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
)

from attention_worker.kernels.decode_attention import decode_attention
from attention_worker.kernels.decode_plan import plan_decode
from attention_worker.kernels.mqa import is_decode, is_plain

_PAGE = 64
"""Smallest number of tokens per KV-cache page: a tile of the kernel reads one page number then."""


@cache
def _processors() -> int:
    count: int = current_platform.num_compute_units()
    return count


class MqaImpl(FlashAttentionImpl):
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes as in FlashAttentionImpl: query FP8 [tokens, heads, head_size], kv_cache [blocks,
        1, block_size, 2 * head_size], output [tokens, heads, head_size]."""
        quantised = output_scale is not None or output_block_scale is not None
        if attn_metadata is None or quantised or not (is_plain(self) and is_decode(attn_metadata)):
            by_vllm: torch.Tensor = super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
            return by_vllm
        # One token per request; padding has length 0. In a micro-batch this is a NumPy integer.
        rows = int(attn_metadata.num_actual_tokens)
        codes = kv_cache.view(current_platform.fp8_dtype()).transpose(1, 2)
        keys, values = codes.split(self.head_size, dim=-1)
        plan = plan_decode(rows, 1, self.num_heads, self.head_size, 1, _processors())
        decode_attention(
            query[:rows],
            keys,
            values,
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            output[:rows],
            self.scale,
            plan,
            layer._q_scale,
            layer._k_scale,
            layer._v_scale,
        )
        return output


class MqaBackend(FlashAttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[MqaImpl]:
        return MqaImpl

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return max(default_block_size, _PAGE)

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return False  # the kernel reads one scale per tensor
