"""Rung 1: the AITER backend against a fake that undoes AITER's layouts and computes."""

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

import fake_aiter  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.wire.dtypes_torch import DTYPE_OF_TAG  # noqa: E402
from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from ffn_worker.allreduce.aiter_quickreduce import FORMATS, Provider, QuickAllReduceBackend  # noqa: E402
from ffn_worker.moe.aiter import FP8_OF_ARCH, AiterBackend  # noqa: E402
from ffn_worker.moe.device import launched_as  # noqa: E402
from ffn_worker.moe.quantise import Weight, in_scheme  # noqa: E402
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402

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


def quantised(w13, w2, scheme, arch, experts=(0, EXPERTS)):
    return [
        in_scheme(Weight.of(w[slice(*experts)].clone()), scheme, FP8_OF_ARCH[arch], torch.bfloat16)
        for w in (w13, w2)
    ]


def expected(w13, w2, scheme, arch, experts, x, ids, scale):
    """Returns the reference result on the quantised weights, without any layout change."""
    reference = ReferenceBackend(experts)
    reference.prepare(0, *quantised(w13, w2, scheme, arch, experts))
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
    backend = AiterBackend(experts, EXPERTS, arch=arch)
    backend.prepare(0, *quantised(w13, w2, scheme, arch, experts))
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
    fake = fake_aiter.install(monkeypatch, DTYPE_OF_TAG[fp8])
    w13, w2 = weights()
    x, ids, scale = batch(8)
    rows = EncodedRows.of(x, Tag.E2M1 if scheme is Scheme.MXFP4 else fp8)
    back = rows.decode(torch.float32)
    backend = AiterBackend((0, EXPERTS), EXPERTS, arch=arch)
    backend.prepare(0, *quantised(w13, w2, scheme, arch))
    real = torch.tensor([5])
    got = backend.forward_encoded(0, rows, ids, scale, torch.bfloat16, real=real)
    given = fake.calls[-1][1]
    assert given["hidden_states"].data_ptr() == rows.payload.data_ptr()
    assert given["a1_scale"].data_ptr() == rows.scales.data_ptr()
    want = expected(w13, w2, scheme, arch, (0, EXPERTS), back, ids, scale)
    close(got[:5], want[:5])
    assert got[5:].isnan().all()


@pytest.mark.parametrize(("arch", "scheme"), CASES)
def test_a_graph_finds_its_padding_on_the_device(monkeypatch, arch, scheme):
    """Rows after the last unmasked pair are not computed, and their results are zero."""
    fake = fake_aiter.install(monkeypatch, DTYPE_OF_TAG[FP8_OF_ARCH[arch]])
    w13, w2 = weights()
    x, ids, scale = batch(8)
    ids[5:] = -1  # padding behind the last attention instance
    ids[2] = -1  # padding behind the first one
    backend = AiterBackend((0, EXPERTS), EXPERTS, arch=arch)
    backend.prepare(0, *quantised(w13, w2, scheme, arch))
    assert backend.capturable is (scheme is not Scheme.MXFP4)
    with launched_as("graph"):
        got = backend.forward(0, x, ids, scale)
        real = fake.calls[-1][1]["num_local_tokens"]
        assert real.dtype == torch.int32 and real.tolist() == [5]
        assert (backend.forward(0, x, torch.full_like(ids, -1), scale) == 0).all()
        assert fake.calls[-1][1]["num_local_tokens"].tolist() == [0]
    close(got, expected(w13, w2, scheme, arch, (0, EXPERTS), x, ids, scale))
    backend.forward(0, x, ids, scale)
    assert fake.calls[-1][1].get("num_local_tokens") is None  # the host launches all rows


def test_rows_of_another_format_are_decoded(monkeypatch):
    fake = fake_aiter.install(monkeypatch, torch.float8_e4m3fnuz)
    w13, w2 = weights()
    backend = AiterBackend((0, EXPERTS), EXPERTS, arch="gfx942")
    backend.prepare(0, *quantised(w13, w2, Scheme.FP8_BLOCK, "gfx942"))
    x, ids, scale = batch(4)
    for tag in (Tag.E4M3FN, Tag.E2M1):
        rows = EncodedRows.of(x, tag)
        got = backend.forward_encoded(0, rows, ids, scale, torch.bfloat16)
        assert fake.calls[-1][1].get("a1_scale") is None
        back = rows.decode(torch.bfloat16).float()
        shard = (w13, w2, Scheme.FP8_BLOCK, "gfx942", (0, EXPERTS))
        close(got, expected(*shard, back, ids, scale))


def test_the_fake_detects_an_unshuffled_weight(monkeypatch):
    """Negative control: a wrong layout gives a wrong result."""
    fake = fake_aiter.install(monkeypatch, torch.float8_e4m3fn)
    w13, w2 = weights()
    x, ids, scale = batch(4)
    backend = AiterBackend((0, EXPERTS), EXPERTS, arch="gfx950")
    backend.prepare(0, *quantised(w13, w2, Scheme.PLAIN, "gfx950"))
    layer = backend._layers[0]
    plain = fake._unshuffle_weight(layer.w2)
    plain.is_shuffled = True
    backend._layers[0] = replace(layer, w2=plain)
    got = backend.forward(0, x, ids, scale).float()
    want = expected(w13, w2, Scheme.PLAIN, "gfx950", (0, EXPERTS), x, ids, scale)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), 0) < 0.5


def test_fp4_weights_are_refused_on_gfx942(monkeypatch):
    fake_aiter.install(monkeypatch, torch.float8_e4m3fnuz)
    fp4 = quantised(*weights(), Scheme.MXFP4, "gfx942")
    with pytest.raises(ConfigError, match="gfx942 has no FP4 matrix instructions"):
        AiterBackend((0, EXPERTS), EXPERTS, arch="gfx942").prepare(0, *fp4)


def test_other_architectures_are_refused():
    with pytest.raises(ConfigError, match="runs on gfx942 and gfx950, not on gfx90a"):
        AiterBackend((0, 1), 1, arch="gfx90a")
    assert "not installed" in AiterBackend.unavailable(torch.bfloat16, 256, 128)


def test_all_reduce_formats_are_passed_by_name():
    assert FORMATS[Provider.AITER][1] == "FP8" and FORMATS[Provider.VLLM][1] == "INT8"
    with pytest.raises(ConfigError, match="AITER has no all-reduce format INT8"):
        QuickAllReduceBackend(None, torch.device("cpu"), "INT8", Provider.AITER)
