"""Every MoE backend against the reference, with all experts and in expert-parallel shards."""

import itertools
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from afd.errors import ConfigError  # noqa: E402
from ffn_worker.moe import vllm_cpu  # noqa: E402
from ffn_worker.moe.pairs import local_pairs  # noqa: E402
from ffn_worker.moe.quantise import Weight  # noqa: E402
from ffn_worker.moe.registry import AUTO_ORDER, BACKENDS  # noqa: E402
from ffn_worker.moe.selection import choose_backend  # noqa: E402
from ffn_worker.moe.vllm_cpu import kernel_isa, load_operators  # noqa: E402

EXPERTS, TOP_K, HIDDEN, WIDTH = 8, 3, 128, 96
# The others are tested in tests/amd and tests/gpu.
ON_CPU = [name for name in BACKENDS if name not in ("aiter", "triton")]
FAST = [name for name in ON_CPU if name != "reference"]
# Largest allowed error, relative to the largest output of an unrounded float32 reference. In
# bfloat16 (unit roundoff u = 2**-8) a backend may round gate, up, activation, product, expert
# output and sum; measured over 60 seeds: at most 2.2 u. One lost pair among 33 rows gives 30 u or
# more.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4 * 2**-8}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def usable(name, dtype):
    reason = BACKENDS[name].load().unavailable(dtype, HIDDEN, WIDTH)
    if reason:
        pytest.skip(f"backend {name}: {reason}")


def weights(dtype):
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    return w13.to(dtype), w2.to(dtype)


def batch(rows, dtype):
    x = torch.randn(rows, HIDDEN).to(dtype)
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]) if rows else None
    ids = torch.empty(0, TOP_K) if ids is None else ids
    # No router weight is near 0, so that one lost pair exceeds bfloat16 rounding.
    return x, ids.to(torch.int32), 0.5 + torch.rand(rows, TOP_K) / 2


def build(name, w13, w2, experts=(0, EXPERTS)):
    backend = BACKENDS[name].load()(experts)
    start, end = experts
    backend.prepare(5, Weight.of(w13[start:end].clone()), Weight.of(w2[start:end].clone()))
    return backend


def unrounded(w13, w2, x, ids, scale, experts=(0, EXPERTS)):
    """Returns the float32 output of the reference for inputs and weights of any dtype."""
    return build("reference", w13, w2, experts).forward(5, x.float(), ids, scale)


def assert_close(actual, expected, factor=1.0):
    assert actual.shape == expected.shape
    error = (actual.float() - expected.float()).abs().max()
    assert error <= factor * TOLERANCE[actual.dtype] * expected.float().abs().max()


def test_reference_equals_the_formula_pair_by_pair():
    w13, w2 = weights(torch.float32)
    x, ids, scale = batch(4, torch.float32)
    expected = torch.zeros(4, HIDDEN, dtype=torch.float64)
    for row in range(4):
        for k in range(TOP_K):
            expert = int(ids[row, k])
            h = w13[expert].double() @ x[row].double()
            gate, up = h[:WIDTH], h[WIDTH:]
            act = gate / (1 + torch.exp(-gate)) * up
            expected[row] += scale[row, k] * (w2[expert].double() @ act)
    actual = build("reference", w13, w2).forward(5, x, ids, scale)
    assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 200])
@pytest.mark.parametrize("name", FAST)
def test_full_range(name, rows, dtype):
    usable(name, dtype)
    w13, w2 = weights(dtype)
    x, ids, scale = batch(rows, dtype)
    before = x.clone()
    actual = build(name, w13, w2).forward(5, x, ids, scale)
    assert actual.dtype == dtype
    assert_close(actual, unrounded(w13, w2, x, ids, scale))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bounds", [(0, 4, 8), (0, 1, 3, 8)])
@pytest.mark.parametrize("name", ON_CPU)
def test_shards_add_up(name, bounds, dtype):
    usable(name, dtype)
    w13, w2 = weights(dtype)
    x, ids, scale = batch(19, dtype)
    total = torch.zeros(19, HIDDEN)
    for experts in itertools.pairwise(bounds):
        partial = build(name, w13, w2, experts).forward(5, x, ids, scale)
        assert_close(partial, unrounded(w13, w2, x, ids, scale, experts))
        total += partial.float()
    assert_close(total.to(dtype), unrounded(w13, w2, x, ids, scale), factor=2)


@pytest.mark.parametrize("name", ON_CPU)
def test_masked_pairs_and_rows(name):
    usable(name, torch.float32)
    w13, w2 = weights(torch.float32)
    x, ids, scale = batch(6, torch.float32)
    ids[1] = -1
    ids[3, 0] = -7
    x[1] = float("nan")
    out = build(name, w13, w2).forward(5, x, ids, scale)
    assert torch.equal(out[1], torch.zeros(HIDDEN))
    unmasked = scale.clone()
    unmasked[3, 0] = 0
    keep = [0, 2, 3, 4, 5]
    expected = unrounded(w13, w2, x[keep], ids[keep], unmasked[keep])
    assert_close(out[keep], expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ON_CPU)
def test_no_rows_and_nothing_local(name, dtype):
    usable(name, dtype)
    w13, w2 = weights(dtype)
    empty = build(name, w13, w2).forward(5, *batch(0, dtype))
    assert empty.shape == (0, HIDDEN) and empty.dtype == dtype
    x, _, scale = batch(4, dtype)
    elsewhere = torch.full((4, TOP_K), 7, dtype=torch.int32)
    out = build(name, w13, w2, (0, 7)).forward(5, x, elsewhere, scale)
    assert out.dtype == dtype and torch.equal(out, torch.zeros_like(x))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ON_CPU)
def test_linear(name, dtype):
    usable(name, dtype)
    weight = (torch.randn(48, HIDDEN) / HIDDEN**0.5).to(dtype)
    x = torch.randn(5, HIDDEN).to(dtype)
    linear = BACKENDS[name].load()((0, 1)).linear(weight)
    assert linear(x).dtype == dtype
    assert_close(linear(x), x.double() @ weight.double().T)
    assert linear(x[:0]).shape == (0, 48)


def test_linear_without_a_kernel_of_onednn_for_it(monkeypatch):
    """bfloat16 on x86 processors without AVX-512."""

    def refuse(weight):
        raise RuntimeError("could not create a primitive descriptor for the matmul primitive")

    usable("vllm_cpu", torch.bfloat16)
    monkeypatch.setattr(vllm_cpu, "_OneDnnLinear", refuse)
    weight, x = torch.randn(48, HIDDEN).bfloat16(), torch.randn(5, HIDDEN).bfloat16()
    linear = BACKENDS["vllm_cpu"].load()((0, 1)).linear(weight)
    assert torch.equal(linear(x), torch.nn.functional.linear(x, weight))


def test_a_row_does_not_depend_on_the_other_rows():
    w13, w2 = weights(torch.float32)
    x, ids, scale = batch(9, torch.float32)
    backend = build(choose_backend("auto", torch.float32, HIDDEN, WIDTH), w13, w2)
    whole = backend.forward(5, x, ids, scale)
    alone = torch.cat([backend.forward(5, x[[r]], ids[[r]], scale[[r]]) for r in range(9)])
    assert_close(alone, whole)


def test_local_pairs():
    ids = torch.tensor([[0, 5], [3, -1], [4, 3]], dtype=torch.int32)
    scale = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    pairs = local_pairs(ids, scale, 3, 5)
    assert pairs.rows.tolist() == [1, 2, 2]
    assert pairs.experts.tolist() == [0, 1, 0]
    assert torch.equal(pairs.weights, torch.tensor([0.3, 0.5, 0.6]))


def test_choose_backend():
    auto = choose_backend("auto", torch.bfloat16, HIDDEN, WIDTH)
    assert auto == ("torch" if load_operators() else "vllm_cpu")
    # 2*I = 40 is not a multiple of 32, so vLLM has no grouped kernel for it either.
    assert choose_backend("auto", torch.bfloat16, HIDDEN, 20) == "torch"
    assert choose_backend("reference", torch.float32, HIDDEN, WIDTH) == "reference"
    assert set(AUTO_ORDER) <= set(BACKENDS)
    with pytest.raises(ConfigError, match="auto, torch, reference, vllm_cpu"):
        choose_backend("cuda", torch.float32, HIDDEN, WIDTH)
    with pytest.raises(ConfigError, match="vllm_cpu cannot run"):
        choose_backend("vllm_cpu", torch.bfloat16, HIDDEN, 20)
    with pytest.raises(ConfigError, match="empty"):
        BACKENDS["torch"].load()((3, 3))


@pytest.mark.parametrize(("hidden", "width"), [(128, 96), (512, 256), (160, 32)])
@pytest.mark.parametrize("rows", [1, 3, 16, 90])
def test_products_in_bfloat16_are_as_near_as_those_in_float32(hidden, width, rows, monkeypatch):
    if kernel_isa(torch.bfloat16, hidden, width) != "bf16":
        pytest.skip("the processor has no AVX512_BF16, or has AMX, or vLLM is older than 0.30")
    w13 = (torch.randn(EXPERTS, 2 * width, hidden) / hidden**0.5).bfloat16()
    w2 = (torch.randn(EXPERTS, hidden, width) / width**0.5).bfloat16()
    _, ids, scale = batch(rows, torch.bfloat16)
    x = torch.randn(rows, hidden).bfloat16()
    exact = unrounded(w13, w2, x, ids, scale)
    found = build("vllm_cpu", w13, w2).forward(5, x, ids, scale)
    monkeypatch.setattr("ffn_worker.moe.vllm_cpu.fused_experts", lambda: None)
    assert kernel_isa(torch.bfloat16, hidden, width) == "vec"
    plain = build("vllm_cpu", w13, w2).forward(5, x, ids, scale)
    assert (found - exact).norm() < 1.5 * (plain - exact).norm()
    assert_close(found, exact)


def test_kernel_choice(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr("ffn_worker.moe.vllm_cpu.ask_for_amx", lambda: False)
    assert kernel_isa(torch.float32, 128, 96) == "vec"
    assert kernel_isa(torch.float32, 100, 96) is None
    monkeypatch.setattr("ffn_worker.moe.vllm_cpu.fused_experts", lambda: print)
    assert kernel_isa(torch.bfloat16, 128, 96) == "bf16"
    assert kernel_isa(torch.bfloat16, 128, 80) == kernel_isa(torch.float32, 128, 96) == "vec"
    monkeypatch.setattr("ffn_worker.moe.vllm_cpu.fused_experts", lambda: None)
    assert kernel_isa(torch.bfloat16, 128, 96) == "vec"
    monkeypatch.setattr("ffn_worker.moe.vllm_cpu.ask_for_amx", lambda: True)
    assert kernel_isa(torch.bfloat16, 128, 96) == "amx"
    assert kernel_isa(torch.float32, 128, 96) is None
    monkeypatch.setattr("ffn_worker.moe.vllm_cpu.ask_for_amx", lambda: False)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert kernel_isa(torch.bfloat16, 128, 96) == "neon"
    assert kernel_isa(torch.float32, 128, 96) is None


def test_a_process_that_did_nothing_before_may_use_the_kernel():
    """An FFN instance is one. Linux ends a process that uses AMX tiles and did not ask for them."""
    usable("vllm_cpu", torch.bfloat16)
    code = """
import torch
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.vllm_cpu import VllmCpuBackend
backend = VllmCpuBackend((0, 2), 2)
w13, w2 = torch.ones(2, 64, 64, dtype=torch.bfloat16), torch.ones(2, 64, 32, dtype=torch.bfloat16)
backend.prepare(0, Weight.of(w13), Weight.of(w2))
x = torch.ones(40, 64, dtype=torch.bfloat16)
backend.forward(0, x, torch.zeros(40, 1, dtype=torch.int32), torch.ones(40, 1))
"""
    done = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stderr


def test_vllm_python_code_is_not_imported():
    reason = load_operators()
    if reason:
        pytest.skip(reason)
    loaded_by_others = "vllm" in sys.modules
    load_operators.cache_clear()
    assert load_operators() is None
    assert ("vllm" in sys.modules) == loaded_by_others
