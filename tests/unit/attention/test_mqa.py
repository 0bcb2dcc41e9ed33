"""Kernel "mqa": when it replaces vLLM's FlashAttention, and the arguments it gets."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from afd.config.deployment import Deployment
from afd.errors import ConfigError
from attention_worker.kernels.mqa import is_decode, is_plain, refusal
from attention_worker.vllm_hooks.versions import installed


@dataclass(frozen=True)
class Layer:
    attn_type: str = "decoder"
    sliding_window: tuple[int, int] = (-1, -1)
    alibi_slopes: object | None = None
    logits_soft_cap: float = 0
    sinks: object | None = None
    dcp_world_size: int = 1
    batch_invariant_enabled: bool = False


@dataclass(frozen=True)
class Batch:
    max_query_len: int = 1
    use_cascade: bool = False
    causal: object = True
    mm_prefix_range_tensor: object | None = None
    rswa_prefix_lens: object | None = None


@pytest.mark.parametrize(
    "other",
    [
        {"attn_type": "encoder"},
        {"sliding_window": (127, 0)},
        {"alibi_slopes": (1.0,)},
        {"logits_soft_cap": 30.0},
        {"sinks": (1.0,)},
        {"dcp_world_size": 2},
        {"batch_invariant_enabled": True},
    ],
)
def test_layers_with_other_features_use_flash_attention(other):
    assert is_plain(Layer()) and not is_plain(replace(Layer(), **other))


@pytest.mark.parametrize(
    "other",
    [
        {"max_query_len": 2},
        {"use_cascade": True},
        {"causal": False},
        {"mm_prefix_range_tensor": ()},
        {"rswa_prefix_lens": ()},
    ],
)
def test_steps_other_than_decode_use_flash_attention(other):
    assert is_decode(Batch()) and not is_decode(replace(Batch(), **other))


def test_unsupported_models_are_refused_with_a_remedy():
    assert refusal("fp8", 1, 256) is None
    assert "--kv-cache-dtype=fp8" in refusal("auto", 1, 256)
    assert "one key/value head, this one has 4" in refusal("fp8", 4, 128)
    assert "64, 128, 256" in refusal("fp8", 1, 192)
    for refused in (refusal("auto", 1, 256), refusal("fp8", 4, 128), refusal("fp8", 1, 192)):
        assert refused.endswith("set attention.kernel: vllm")


def test_the_setting_needs_a_gpu():
    with pytest.raises(ValueError, match="kernel mqa runs on device cuda, not cpu"):
        Deployment.from_plain({"model": "m", "attention": {"kernel": "mqa"}})


def test_the_command_line_selects_the_backend(tiny_models):
    from afd.config.roles import RoleSpec
    from attention_worker.vllm_hooks.command import attention_command

    for kernel, asked in (("mqa", True), ("vllm", False)):
        plain = {"model": str(tiny_models("qwen3_moe")), "ffn": {"device": "cuda"}}
        plain["attention"] = {"device": "cuda", "kernel": kernel}
        spec = RoleSpec("attention", 0, Deployment.from_plain(plain), "x", api_port=9)
        assert ("--attention-backend=CUSTOM" in attention_command(spec, {})[0]) is asked


def cache_shape(backend, pages, page, dim):
    """Returns vLLM's shape of an FP8 cache with one head."""
    import torch

    vllm = installed()
    assert vllm is not None
    if vllm.number < (0, 29):
        return backend.get_kv_cache_shape(pages, page, 1, dim, "fp8")
    from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layer_kv_cache_shape_bytes

    spec = FullAttentionSpec(page, num_kv_heads=1, head_size=dim, dtype=torch.uint8)
    return compute_layer_kv_cache_shape_bytes(spec, pages)


def test_the_backend_finds_keys_and_values_in_vllms_cache(monkeypatch):
    """FP8 on the CPU with the reference kernel, vLLM's cache layout, and padding rows."""
    pytest.importorskip("vllm.v1.attention.backends.flash_attn")
    import torch

    from attention_worker.kernels.decode_attention import reference_decode_attention
    from attention_worker.vllm_hooks import mqa_backend

    given = []

    def kernel(q, keys, values, table, lengths, out, scale, plan, q_scale, k_scale, v_scale):
        given.append(plan)
        scales = (float(s) for s in (q_scale, k_scale, v_scale))
        out.copy_(reference_decode_attention(q, keys, values, table, lengths, scale, *scales))

    monkeypatch.setattr(mqa_backend, "decode_attention", kernel)
    monkeypatch.setattr(mqa_backend, "_processors", lambda: 132)
    torch.manual_seed(0)
    backend, fp8 = mqa_backend.MqaBackend, torch.float8_e4m3fn
    pages, page, heads, dim = 6, backend.get_preferred_block_size(16), 4, 64
    shape = cache_shape(backend, pages, page, dim)
    keys, values = (torch.randn(pages, page, 1, dim).to(fp8) for _ in range(2))
    stored = torch.cat([keys, values], -1)  # the memory layout: [pages, page, 1, 2 * dim]
    cache = stored.transpose(1, 2).view(torch.uint8)
    assert cache.shape == shape
    impl = backend.get_impl_cls().__new__(mqa_backend.MqaImpl)
    for name, value in vars(Layer()).items():
        setattr(impl, name, value)
    impl.num_heads, impl.head_size, impl.scale = heads, dim, 0.125
    layer = SimpleNamespace(_q_scale=torch.tensor(2.0), _k_scale=torch.tensor(0.5))
    layer._v_scale = torch.tensor(3.0)
    batch = SimpleNamespace(
        **vars(Batch()),
        num_actual_tokens=np.int32(3),  # a NumPy integer, as vLLM passes for a micro-batch
        block_table=torch.tensor([[3, 1], [5, 0], [0, 0], [0, 0]], dtype=torch.int32),
        seq_lens=torch.tensor([70, 64, 0], dtype=torch.int32),
    )
    q = torch.randn(4, heads, dim).to(fp8)
    out = torch.full((4, heads, dim), 7.0)
    none = torch.empty(0)
    assert impl.forward(layer, q, none, none, cache, batch, out) is out
    want = reference_decode_attention(
        q[:3], keys, values, batch.block_table, batch.seq_lens, 0.125, 2.0, 0.5, 3.0
    )
    assert torch.allclose(out[:3], want) and not out[2].any() and (out[3] == 7).all()
    assert given[0].splits > 1 and page == 64
    # Triton refuses NumPy integers.
    assert all(type(n) in (int, bool) for n in vars(given[0]).values())

    taken = []
    monkeypatch.setattr(
        mqa_backend.FlashAttentionImpl, "forward", lambda *a: taken.append(a[6]) or a[7]
    )
    for other in ({"max_query_len": 2}, {"use_cascade": True}):
        more = SimpleNamespace(**{**vars(batch), **other})
        assert impl.forward(layer, q, none, none, cache, more, out) is out
    impl.sliding_window = (9, 0)
    impl.forward(layer, q, none, none, cache, batch, out)
    impl.forward(layer, q, none, none, cache, None, out)
    assert len(taken) == 4 and len(given) == 1


def test_the_bench_runs_without_a_gpu(tmp_path, capsys):
    from afd.records import read_records
    from afd_bench.gpu import attention

    out = tmp_path / "attention.json"
    argv = ["--device", "cpu", "--cells", "128x4096", "128x256-8192", "--out", str(out)]
    assert attention.main(argv) == 0
    assert "128x4096: " in capsys.readouterr().out
    records = read_records(out)
    assert {r.metric for r in records} == {"us", "us_beside_memory"} and len(records) == 4
    with pytest.raises(ConfigError, match="unknown cells 7x7; use some of 1x32768"):
        attention.main(["--cells", "7x7"])


def test_bytes_and_lengths_of_a_cell():
    from afd_bench.gpu.attention import cells

    assert cells(1)["128x4096"].kv_bytes == 268_435_456
    mixed = cells(1)["128x256-8192"].lengths
    assert len(mixed) == 128 and min(mixed) >= 256 and max(mixed) <= 8192 and cells(1) == cells(1)
