"""Fused attention halves: our kernels between vLLM's projections and its attention core.

The forwards below follow Qwen3MoeAttention and Step3TextAttention of vLLM 0.26
(models/qwen3_moe.py, models/step3_text.py). Projections and attention core stay vLLM's.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import current_platform
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from afd.models import Family
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from attention_worker.fused import Facts, Wanted, chosen, why_not_attention, why_not_encoding
from attention_worker.kernels.fused_attention import (
    HeadNorms,
    PagedCache,
    Queries,
    Rope,
    add_norm_encode,
    rotate_heads,
    store_heads,
    store_low_rank,
)
from attention_worker.model import LayerHalves

logger = logging.getLogger("afd.attention")


class Core:
    """vLLM's attention core of one layer, and its KV cache, as the kernels use them."""

    def __init__(self, layer: Attention, cos_sin: torch.Tensor) -> None:
        """cos_sin: of the rotary embedding, in the dtype of the rows."""
        self._layer = layer
        self._cos_sin = cos_sin
        self.width: int = layer.head_size
        self.kv_columns = layer.num_kv_heads * layer.head_size

    def rope(self, positions: torch.Tensor) -> Rope:
        return Rope(self._cos_sin, positions)

    def queries(self, dtype: torch.dtype) -> Queries:
        """How the core takes queries. dtype: of the rows."""
        layer = self._layer
        if layer.query_quant is not None and layer.impl.supports_quant_query_input:
            dtype = current_platform.fp8_dtype()
        return Queries(dtype, layer._q_scale)

    def cache(self, positions: torch.Tensor) -> PagedCache | None:
        """Returns the KV cache and the slots of the step; None: there is none yet."""
        layer = self._layer
        slots = get_forward_context().slot_mapping.get(layer.layer_name)
        if slots is None:
            return None
        cache = layer.kv_cache
        if layer.kv_cache_dtype.startswith("fp8"):
            cache = cache.view(current_platform.fp8_dtype())
        keys, values = cache.transpose(1, 2).split(self.width, dim=-1)
        return PagedCache(keys, values, (layer._k_scale, layer._v_scale), slots)

    def attend(self, queries: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
        """Returns the attention output, dtype of ``qkv`` [rows, heads * head_dim].

        qkv: the first projection; FlashAttention reads keys and values from the cache only, so
        those passed here are not looked at.
        """
        layer, shape = self._layer, (len(qkv), -1, self.width)
        keys, values = qkv[:, -2 * self.kv_columns :].split(self.kv_columns, dim=-1)
        columns = layer.num_heads * self.width
        output = torch.empty((len(qkv), columns), dtype=qkv.dtype, device=qkv.device)
        unified_attention_with_output(
            queries.view(shape),
            keys.unflatten(1, (-1, self.width)),
            values.unflatten(1, (-1, self.width)),
            output.view(shape),
            layer.layer_name,
        )
        return output


def _heads(module: Any, core: Core) -> Callable[..., torch.Tensor]:
    """Attention whose query and key heads are normalised one by one."""
    norms = HeadNorms(
        module.q_norm.weight.data, module.k_norm.weight.data, module.q_norm.variance_epsilon
    )

    def forward(positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        cache = core.cache(positions)
        if cache is None:
            return plain(positions=positions, hidden_states=hidden_states)
        qkv, _ = module.qkv_proj(hidden_states)
        queries = store_heads(qkv, norms, core.rope(positions), cache, core.queries(qkv.dtype))
        output: torch.Tensor = module.o_proj(core.attend(queries, qkv))[0]
        return output

    plain: Callable[..., torch.Tensor] = module
    return forward


def _low_rank(module: Any, core: Core) -> Callable[..., torch.Tensor]:
    """Attention whose queries are a second projection of normalised low-rank queries."""
    weight, eps = module.inter_norm.weight.data, module.inter_norm.variance_epsilon

    def forward(positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        cache = core.cache(positions)
        if cache is None:
            return plain(positions=positions, hidden_states=hidden_states)
        qkv, _ = module.qkv_proj(hidden_states)
        rope = core.rope(positions)
        low = store_low_rank(qkv, weight, eps, rope, cache)
        q = module.wq(low)[0]
        queries = rotate_heads(q, core.width, rope, core.queries(qkv.dtype))
        output: torch.Tensor = module.o_proj(core.attend(queries, qkv))[0]
        return output

    plain: Callable[..., torch.Tensor] = module
    return forward


_FORMS = {"heads": _heads, "low_rank": _low_rank}


def _encoding_norm(norm: Any, tag: Tag) -> Callable[..., Any]:
    weight, eps = norm.weight.data, norm.variance_epsilon

    def post_norm(
        hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, EncodedRows]:
        rows, encoded = add_norm_encode(hidden, residual, weight, eps, tag)
        return rows, residual, encoded

    return post_norm


def fuse(halves: Sequence[LayerHalves], family: Family, wanted: Wanted) -> None:
    """Puts the fused kernels into the layers where they fit, and logs what was decided.

    Raises:
        ConfigError: ``attention.fused`` is true, and the attention layers do not allow it.
    """
    if wanted.fused is False:
        logger.info("attention.fused: off, as configured")
        return
    reason = _why_not(halves, family, wanted)
    attention = chosen(wanted.fused, reason)
    encoding = why_not_encoding(wanted) if attention else "the attention kernels are off"
    tables: dict[int, torch.Tensor] = {}  # get_rope() shares one embedding among layers
    for half in halves:
        replaced = None
        if attention:
            module: Any = half.attention
            rope, dtype = module.rotary_emb, half.post_norm.weight.dtype
            table = tables.setdefault(id(rope), rope.cos_sin_cache.to(dtype))
            replaced = _FORMS[family.fused](module, Core(module.attn, table))
        encodes = encoding is None and half.is_remote
        half.fuse(replaced, _encoding_norm(half.post_norm, wanted.tag) if encodes else None)
    logger.info(
        "attention.fused: norms, rotation and cache write %s; norm and rows for the wire %s",
        "in our kernels" if attention else f"by vLLM ({reason})",
        "in one kernel" if encoding is None else f"in two ({encoding})",
    )


def _why_not(halves: Sequence[LayerHalves], family: Family, wanted: Wanted) -> str | None:
    if not family.fused:
        return f"there is no fused kernel for the attention of {family.name}"
    for half in halves:
        module: Any = half.attention
        facts = _facts(module.attn, module.rotary_emb)
        if (reason := why_not_attention(facts, wanted)) is not None:
            return reason
    return None


def _facts(layer: Attention, rope: Any) -> Facts:
    by_table = isinstance(rope, RotaryEmbedding) and (
        type(rope).forward_cuda is RotaryEmbedding.forward_cuda
    )
    return Facts(
        backend=layer.get_attn_backend().get_name(),
        flash=isinstance(layer.impl, FlashAttentionImpl),
        head_dim=layer.head_size,
        whole_heads=by_table and rope.is_neox_style and rope.rotary_dim == layer.head_size,
        cache=layer.kv_cache_dtype,
        shared=layer.kv_sharing_target_layer_name is not None,
    )
