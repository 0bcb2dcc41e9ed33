"""vLLM's C kernels of RMS norms on CPUs against its torch operations."""

import pytest
import torch

vllm = pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers.layernorm import RMSNorm  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

if not current_platform.is_cpu():
    pytest.skip("vLLM is not the one for CPUs", allow_module_level=True)

from attention_worker.vllm_hooks.cpu_norms import kernels_round, use_c_norms  # noqa: E402

CUTS = "vLLM's kernels for this processor cut bfloat16 instead of rounding"


def norm_of(size: int, dtype: torch.dtype, **more: object) -> RMSNorm:
    with set_current_vllm_config(VllmConfig()):
        norm = RMSNorm(size, eps=1e-6, dtype=dtype, **more)
    norm.weight.data.uniform_(0.5, 1.5)
    return norm


def both(norm: RMSNorm, *tensors: torch.Tensor):
    """Results of vLLM's operations and of the kernels. They work in place, so each gets copies."""
    norm.__dict__.pop("forward", None)
    with torch.inference_mode():
        plain = norm.forward_native(*(t.clone() for t in tensors))
        use_c_norms(torch.nn.ModuleList([norm]))
        assert "forward" in vars(norm)
        return plain, norm(*(t.clone() for t in tensors))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (3, 64), (33, 512), (7, 1040)])
def test_rows_and_heads(rows, size, dtype):
    if not kernels_round(dtype):
        pytest.skip(CUTS)
    torch.manual_seed(rows)
    norm = norm_of(size, dtype)
    x, residual = (3 * torch.randn(rows, size, dtype=dtype) for _ in range(2))
    close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-3}
    torch.testing.assert_close(*both(norm, x), **close)
    (plain, plain_sum), (ours, our_sum) = both(norm, x, residual)
    torch.testing.assert_close(ours, plain, **close)
    assert torch.equal(our_sum, plain_sum)
    heads = torch.randn(rows, 5, 2 * size, dtype=dtype)[:, 1:4, :size]  # a view, as heads are
    with torch.inference_mode():
        torch.testing.assert_close(norm(heads), norm.forward_native(heads), **close)


def test_a_view_with_a_residual_takes_vllms_operations():
    norm = norm_of(32, torch.bfloat16)
    wide = torch.randn(4, 64, dtype=torch.bfloat16)
    use_c_norms(norm)
    x, residual = wide[:, :32], wide[:, 32:]
    with torch.inference_mode():
        plain = norm.forward_native(x.clone(), residual.clone())
        ours = norm(x, residual)
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize(
    ("size", "dtype", "more"),
    [
        (64, torch.float32, {}),
        (24, torch.bfloat16, {}),
        (64, torch.bfloat16, {"var_hidden_size": 32}),
        (64, torch.bfloat16, {"has_weight": False}),
    ],
)
def test_norms_that_stay(size, dtype, more):
    norm = norm_of(size, dtype, **more)
    use_c_norms(norm)
    assert "forward" not in vars(norm)


def test_another_dtype_than_the_weights_takes_vllms_operations():
    norm = norm_of(64, torch.bfloat16)
    use_c_norms(norm)
    x = torch.randn(3, 64)
    with torch.inference_mode():
        assert torch.equal(norm(x), norm.forward_native(x))


def test_norms_stay_where_the_kernels_cut():
    """bfloat16 on x86 processors without AVX512_BF16."""
    norm = norm_of(64, torch.bfloat16)
    use_c_norms(norm)
    assert ("forward" in vars(norm)) == kernels_round(torch.bfloat16)
    if not kernels_round(torch.bfloat16):
        x, residual = (3 * torch.randn(33, 64, dtype=torch.bfloat16) for _ in range(2))
        exact = x.float() + residual.float()
        torch.ops._C.fused_add_rms_norm(x, residual, norm.weight.data, 1e-6)
        assert not torch.equal(residual, exact.bfloat16()), "they round: use them"
