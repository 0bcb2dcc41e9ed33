"""vLLM's FlashAttention backend, with decode steps of an FP8 cache on our kernel.

``attention.kernel: mqa`` registers it as vLLM's ``CUSTOM`` backend. Metadata, cache layout, writing
to the cache, prefill and whatever :mod:`attention_worker.mqa` does not let through stay
FlashAttention's (vllm/v1/attention/backends/flash_attn.py, 0.26.0).
"""

from functools import cache

import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
)

from attention_worker.decode_attention import decode_attention
from attention_worker.decode_plan import plan_decode
from attention_worker.mqa import is_decode, is_plain

_PAGE = 64
"""Tokens of a page unless --block-size says otherwise: one number per tile of the kernel."""


@cache
def _processors() -> int:
    return current_platform.num_compute_units()


class MqaImpl(FlashAttentionImpl):
    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shapes as FlashAttentionImpl's: query FP8 [tokens, heads, head_size], kv_cache [blocks,
        1, block_size, 2 * head_size], output [tokens, heads, head_size]."""
        quantised = output_scale is not None or output_block_scale is not None
        if attn_metadata is None or quantised or not (is_plain(self) and is_decode(attn_metadata)):
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale,
                output_block_scale,
            )  # fmt: skip
        # One per request; those that pad a graph have 0. In a micro-batch it is of NumPy's type.
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
        return False  # the kernel reads one scale each
