"""Attention of Qwen3-MoE by direct calls of vLLM's CPU kernels, against vLLM's own module."""

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    init_distributed_environment,
    initialize_model_parallel,
)
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("vLLM is not the one for CPUs", allow_module_level=True)

from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.models.qwen3_moe import Qwen3MoeAttention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attention_worker.vllm_hooks import cpu_attention
from attention_worker.vllm_hooks.cpu_norms import kernels_round, use_c_norms

HIDDEN, HEADS, KV_HEADS, WIDTH, BLOCK = 128, 4, 2, 64, 32
LENGTHS = (5, 1, 40, 33)
"""Tokens of each request after the step."""
NEW = (5, 1, 2, 1)
"""Those of them that the step computes: a prompt, and decodes with and without drafts."""


@pytest.fixture
def dtype():
    return torch.bfloat16


@pytest.fixture
def config(tiny_models, tmp_path, dtype):
    folder = str(tiny_models("qwen3_moe"))
    made = VllmConfig(
        model_config=ModelConfig(folder, dtype=dtype, skip_tokenizer_init=True),
        cache_config=CacheConfig(block_size=BLOCK),
        compilation_config=CompilationConfig(custom_ops=["all"]),  # as attention instances run
    )
    with set_current_vllm_config(made):
        init_distributed_environment(1, 0, f"file://{tmp_path}/store", 0, backend="gloo")
        initialize_model_parallel()
        yield made
    destroy_model_parallel()
    destroy_distributed_environment()


def attention(dtype: torch.dtype, *, bias: bool) -> Qwen3MoeAttention:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        rope = {"rope_type": "default", "rope_theta": 10000.0}
        module = Qwen3MoeAttention(
            HIDDEN, HEADS, KV_HEADS, rope, 64, WIDTH, qkv_bias=bias, prefix="layers.0.self_attn"
        )
    finally:
        torch.set_default_dtype(before)
    for parameter in module.parameters():
        parameter.data.uniform_(-0.2, 0.2)
    for norm in (module.q_norm, module.k_norm):
        norm.weight.data += 1
    for linear in module.modules():
        if isinstance(linear, LinearBase):
            linear.quant_method.process_weights_after_loading(linear)
    use_c_norms(module)
    return module


def inputs(config: VllmConfig, module: Qwen3MoeAttention, dtype: torch.dtype):
    """Returns the metadata of a step, its slots and positions, and a filled KV cache."""
    layer = module.attn
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=WIDTH, dtype=dtype)
    layer.kv_cache = torch.randn(16, KV_HEADS, BLOCK, 2 * WIDTH).to(dtype)
    blocks = torch.randperm(16)[: 2 * len(LENGTHS)].view(len(LENGTHS), 2).int()
    positions = torch.cat(
        [torch.arange(length - new, length) for length, new in zip(LENGTHS, NEW, strict=True)]
    )
    request = torch.repeat_interleave(torch.arange(len(NEW)), torch.tensor(NEW))
    slots = blocks[request, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = torch.tensor([0, *NEW]).cumsum(0).int()
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(LENGTHS).int(),
        num_reqs=len(NEW),
        num_actual_tokens=sum(NEW),
        max_query_len=max(NEW),
        max_seq_len=max(LENGTHS),
        block_table_tensor=blocks,
        slot_mapping=slots,
        causal=True,
    )
    builder = cpu_attn.CPUAttentionMetadataBuilder(
        spec, [layer.layer_name], config, torch.device("cpu")
    )
    return builder.build(0, common), slots, positions


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_equals_vllms_module(config, dtype, bias):
    if not kernels_round(dtype):
        pytest.skip("vLLM's norms for this processor cut bfloat16, so attention stays vLLM's")
    torch.manual_seed(1)
    module = attention(dtype, bias=bias)
    assert cpu_attention.fits(module)
    metadata, slots, positions = inputs(config, module, dtype)
    name, before = module.attn.layer_name, module.attn.kv_cache.clone()
    rows = torch.randn(sum(NEW), HIDDEN).to(dtype)
    found = []
    for forward in (module, cpu_attention.direct(module)):
        module.attn.kv_cache = before.clone()
        with set_forward_context({name: metadata}, config, slot_mapping={name: slots}):
            output = forward(positions=positions, hidden_states=rows.clone())
        found.append((output, module.attn.kv_cache))
    (theirs, their_cache), (ours, our_cache) = found
    assert not torch.equal(their_cache, before)
    assert torch.equal(ours, theirs) and torch.equal(our_cache, their_cache)
    with set_forward_context(None, config):  # a warm-up
        cpu_attention.direct(module)(positions=positions, hidden_states=rows)


@pytest.mark.parametrize("dtype", [torch.float32])
def test_float32_keeps_vllms_arithmetic(config, dtype):
    assert not cpu_attention.fits(attention(dtype, bias=False))
