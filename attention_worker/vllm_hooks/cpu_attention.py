"""Attention of Qwen3-MoE on CPUs: vLLM's kernels without the modules between them.

The same kernels in the same order as Qwen3MoeAttention (vllm/model_executor/models/qwen3_moe.py),
so results are equal bit for bit. Each kernel streams weights or the KV cache through the caches of
the processor, so the Python code between two of them always runs cold: with vLLM's modules it takes
a seventh of the attention half at 16 rows.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention.attention import get_attention_context
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from afd.models import Family
from attention_worker.model import LayerHalves
from attention_worker.vllm_hooks.cpu_norms import has_c_norm

_Forward = Callable[..., torch.Tensor]


def call_kernels_directly(
    halves: Sequence[LayerHalves], family: Family, config: VllmConfig
) -> None:
    """Replaces the attention of the layers where it fits. To be called after ``use_c_norms``.

    Not with adapters, which are modules around the projections, and not where a connector moves the
    KV cache, which waits inside vLLM's attention.
    """
    if family.fused != "heads" or config.lora_config or config.kv_transfer_config:
        return
    for half in halves:
        if fits(half.attention):
            half.fuse(direct(half.attention), None)


def fits(module: Any) -> bool:
    """Returns whether :func:`direct` computes what ``module``, a Qwen3MoeAttention, does."""
    layer = module.attn
    return (
        all(_is_plain(linear) for linear in (module.qkv_proj, module.o_proj))
        and all(has_c_norm(norm) for norm in (module.q_norm, module.k_norm))
        and _is_kernel(module.rotary_emb)
        and type(layer.impl) is CPUAttentionBackendImpl
        and layer.kv_cache_dtype == "auto"
        and layer.kv_sharing_target_layer_name is None
    )


def _is_plain(linear: Any) -> bool:
    """``cpu_linear`` computes all of it: it has no shards and no quantised weight."""
    unquantised = type(linear.quant_method) is UnquantizedLinearMethod
    return unquantised and linear.tp_size == 1 and "cpu_linear" in vars(linear)


def _is_kernel(rope: Any) -> bool:
    """It is vLLM's kernel, as without torch.compile, and not torch operations."""
    method = RotaryEmbedding.forward_cpu
    return type(rope) is RotaryEmbedding and rope._forward_method.__func__ is method


def _weights(linear: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias, as ``cpu_linear`` takes them. The weight may be empty: it has a copy."""
    return linear.weight, linear.bias


def direct(module: Any) -> _Forward:
    """Returns the forward of a Qwen3MoeAttention on CPUs, without its modules' forwards."""
    norm, rotate = torch.ops._C.rms_norm.default, torch.ops._C.rotary_embedding.default
    widths, head_dim = (module.q_size, module.kv_size, module.kv_size), module.head_dim
    q_weight, k_weight = module.q_norm.weight.data, module.k_norm.weight.data
    epsilon = module.q_norm.variance_epsilon
    cos_sin = module.rotary_emb.cos_sin_cache.to(q_weight.dtype)
    is_neox = module.rotary_emb.is_neox_style
    project, finish = module.qkv_proj.cpu_linear, module.o_proj.cpu_linear
    weights, o_weights = _weights(module.qkv_proj), _weights(module.o_proj)
    layer, name = module.attn, module.attn.layer_name
    store, attend = layer.impl.do_kv_cache_update, layer.impl.forward

    def forward(positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """hidden_states: [rows, hidden]; positions: [rows]."""
        metadata, _, cache, slots = get_attention_context(name)
        if metadata is None or slots is None:  # a warm-up
            output: torch.Tensor = module(positions=positions, hidden_states=hidden_states)
            return output
        rows = len(hidden_states)
        q, k, v = project(hidden_states, *weights).split(widths, 1)
        # The norm wants rows that follow one another.
        q_in, k_in = (x.view(rows, -1, head_dim).contiguous() for x in (q, k))
        q_heads, k_heads = torch.empty_like(q_in), torch.empty_like(k_in)
        norm(q_heads, q_in, q_weight, epsilon)
        norm(k_heads, k_in, k_weight, epsilon)
        flat = q_heads.view(rows, -1), k_heads.view(rows, -1)
        rotate(positions, *flat, head_dim, cos_sin, is_neox)
        v_heads = v.view(rows, -1, head_dim)
        store(layer, k_heads, v_heads, cache, slots)
        attended = q_in  # its memory is free now
        attend(layer, q_heads, k_heads, v_heads, cache, metadata, output=attended)
        projected: torch.Tensor = finish(attended.view(rows, -1), *o_weights)
        return projected

    return forward
