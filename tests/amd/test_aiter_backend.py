"""Rung 1: the AITER backend against a stand-in that undoes AITER's layouts and computes."""

import itertools

import pytest

torch = pytest.importorskip("torch")

import fake_aiter  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.wire.codecs_torch import DTYPE_OF_TAG, quantise_fp8, quantise_mxfp4  # noqa: E402
from ffn_worker.allreduce.aiter_quick import FORMATS, Provider, QuickAllReduceBackend  # noqa: E402
from ffn_worker.moe.aiter import FP8_OF_ARCH, AiterBackend, Scheme  # noqa: E402
from ffn_worker.moe.quantise import dequantise_weight, quantise_weight  # noqa: E402
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402

EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 2, 256, 128
CASES = [
    (arch, scheme)
    for arch, scheme in itertools.product(FP8_OF_ARCH, Scheme)
    if (arch, scheme) != ("gfx942", Scheme.MXFP4)
]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def weights():
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    return w13.bfloat16(), (torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5).bfloat16()


def batch(rows):
    x = torch.randn(rows, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).int()
    return x, ids, torch.rand(rows, TOP_K)


def expected(w13, w2, scheme, arch, experts, x, ids, scale):
    """Reference on the quantised weights: what the layouts must come back to."""
    tag = {Scheme.FP8_BLOCK: FP8_OF_ARCH[arch], Scheme.MXFP4: fake_aiter.Tag.E2M1}.get(scheme)
    if tag is not None:
        w13, w2 = (dequantise_weight(quantise_weight(w, tag)) for w in (w13, w2))
    reference = ReferenceBackend(experts)
    start, end = experts
    reference.prepare(0, w13[start:end], w2[start:end])
    return reference.forward(0, x.float(), ids, scale)


def close(got, want):
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().max() <= 2**-8 * want.abs().max()


@pytest.mark.parametrize("experts", [(0, EXPERTS), (2, 5)])
@pytest.mark.parametrize(("arch", "scheme"), CASES)
def test_layouts_masks_and_scales(monkeypatch, arch, scheme, experts):
    fake = fake_aiter.install(monkeypatch, DTYPE_OF_TAG[FP8_OF_ARCH[arch]])
    w13, w2 = weights()
    x, ids, scale = batch(9)
    ids[3, 1] = -1
    backend = AiterBackend(experts, EXPERTS, scheme=scheme, arch=arch)
    backend.prepare(0, w13[slice(*experts)].clone(), w2[slice(*experts)].clone())
    close(
        backend.forward(0, x, ids, scale),
        expected(w13, w2, scheme, arch, experts, x, ids, scale),
    )
    name, given = fake.calls[-1]
    assert name == "aiter.fused_moe.fused_moe"
    names = {Scheme.PLAIN: "No", Scheme.FP8_BLOCK: "per_1x128", Scheme.MXFP4: "per_1x32"}
    assert given["quant_type"].name == names[scheme]
    assert backend.forward(0, x[:0], ids[:0], scale[:0]).shape == (0, HIDDEN)


@pytest.mark.parametrize(("arch", "scheme"), [c for c in CASES if c[1] is not Scheme.PLAIN])
def test_rows_stay_quantised_and_padding_is_not_computed(monkeypatch, arch, scheme):
    fp8 = FP8_OF_ARCH[arch]
    fake_aiter.install(monkeypatch, DTYPE_OF_TAG[fp8])
    w13, w2 = weights()
    x, ids, scale = batch(8)
    if scheme is Scheme.MXFP4:
        codes, scales = quantise_mxfp4(x)
        back = fake_aiter.dequantise_mxfp4(codes, scales, torch.float32)
    else:
        codes, scales = quantise_fp8(x, fp8)
        back = fake_aiter.dequantise_fp8(codes, scales, torch.float32)
    backend = AiterBackend((0, EXPERTS), EXPERTS, scheme=scheme, arch=arch)
    backend.prepare(0, w13.clone(), w2.clone())
    got = backend.run(0, codes, ids, scale, scales=scales, rows=torch.tensor([5]))
    want = expected(w13, w2, scheme, arch, (0, EXPERTS), back, ids, scale)
    close(got[:5], want[:5])
    assert got[5:].isnan().all()


def test_rows_of_another_fp8_kind_are_refused(monkeypatch):
    fake_aiter.install(monkeypatch, torch.float8_e4m3fnuz)
    backend = AiterBackend((0, EXPERTS), EXPERTS, scheme=Scheme.FP8_BLOCK, arch="gfx942")
    backend.prepare(0, *weights())
    x, ids, scale = batch(4)
    codes, scales = quantise_fp8(x)
    with pytest.raises(ConfigError, match=r"gfx942 multiplies e4m3fnuz; set wire.fp8: e4m3fnuz"):
        backend.run(0, codes, ids, scale, scales=scales)
    codes, scales = quantise_mxfp4(x)
    with pytest.raises(ConfigError, match=r"fp8_block experts cannot take rows of torch.uint8"):
        backend.run(0, codes, ids, scale, scales=scales)


def test_the_stand_in_notices_an_unshuffled_weight(monkeypatch):
    """Negative control: the layouts do matter to it."""
    fake = fake_aiter.install(monkeypatch, torch.float8_e4m3fn)
    w13, w2 = weights()
    x, ids, scale = batch(4)
    backend = AiterBackend((0, EXPERTS), EXPERTS, arch="gfx950")
    backend.prepare(0, w13.clone(), w2.clone())
    layer = backend._layers[0]
    plain = fake._unshuffle_weight(layer.w2)
    plain.is_shuffled = True
    backend._layers[0] = type(layer)(layer.w1, plain, None, None)
    got = backend.forward(0, x, ids, scale).float()
    want = expected(w13, w2, Scheme.PLAIN, "gfx950", (0, EXPERTS), x, ids, scale)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) < 0.5


def test_what_it_cannot_run_on():
    with pytest.raises(ConfigError, match="gfx942 has no FP4 matrix instructions"):
        AiterBackend((0, 1), 1, scheme=Scheme.MXFP4, arch="gfx942")
    with pytest.raises(ConfigError, match="runs on gfx942 and gfx950, not on gfx90a"):
        AiterBackend((0, 1), 1, arch="gfx90a")
    assert "not installed" in AiterBackend.unavailable(torch.bfloat16, 256, 128)


def test_all_reduce_formats_travel_by_name():
    assert FORMATS[Provider.AITER][1] == "FP8" and FORMATS[Provider.VLLM][1] == "INT8"
    with pytest.raises(ConfigError, match="AITER has no all-reduce format INT8"):
        QuickAllReduceBackend(None, torch.device("cpu"), "INT8", Provider.AITER)
