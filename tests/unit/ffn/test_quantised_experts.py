"""Quantised rows and weights: every backend against decode-then-compute in float32."""

import json

import pytest

torch = pytest.importorskip("torch")

import fake_kernels  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from shards import load_shard  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.models import read_model  # noqa: E402
from afd.models.checkpoint import tensor_table  # noqa: E402
from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from afd_demo.make_model import make_model  # noqa: E402
from afd_demo.sizes import resolve  # noqa: E402
from ffn_worker.experts.build import load_ffn_model  # noqa: E402
from ffn_worker.experts.plan import shard_of  # noqa: E402
from ffn_worker.moe.quantise import (  # noqa: E402
    Weight,
    dequantise_weight,
    in_scheme,
    quantise_weight,
    widened,
    with_expert,
)
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.registry import BACKENDS  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.selection import choose_backend  # noqa: E402
from ffn_worker.moe.tiles import default_tiling  # noqa: E402
from ffn_worker.moe.triton import TritonBackend  # noqa: E402

EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 2, 256, 256
WIRE = (Tag.BFLOAT16, Tag.E4M3FN, Tag.E4M3FNUZ, Tag.E2M1)
# Largest error relative to the largest value of the exact result. Kernels for FP8 rows also round
# the product of gate and up to FP8 (half a unit of 4 bits, averaged over the width); kernels for
# MXFP4 rows round it to MXFP4. With FP8 weights, MXFP4 and bfloat16 rows are converted to FP8.
BOUND = {Scheme.PLAIN: 2**-6, Scheme.FP8_BLOCK: 0.1, Scheme.MXFP4: 0.4}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def weights(scheme, experts=EXPERTS, width=WIDTH):
    w13 = torch.randn(experts, 2 * width, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(experts, HIDDEN, width) / width**0.5
    return [in_scheme(Weight.of(w), scheme, Tag.E4M3FN, torch.bfloat16) for w in (w13, w2)]


def batch(rows, adversarial=False):
    x = torch.randn(rows, HIDDEN)
    if adversarial:
        x[0, :128] = 0  # a block of zeros
        x[1] *= 1e4
        x[2] *= 1e-3
        x[3, 5] = 3e3  # one outlier, which flattens its block
        x[4] = 0
        x[5] = torch.tensor([-0.25, 0.75, 1.25, 5.0]).repeat(HIDDEN // 4)  # ties of e2m1
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).int()
    return x.bfloat16(), ids, 0.5 + torch.rand(rows, TOP_K) / 2


def exact(held, rows, ids, scale, experts=(0, EXPERTS)):
    """Returns the result of decoding first, then computing in float32 on the same weights."""
    reference = ReferenceBackend(experts)
    reference.prepare(0, *(w[slice(*experts)] for w in held))
    return reference.forward(0, rows.decode(torch.float32), ids, scale)


def assert_close(got, want, bound):
    assert got.dtype == torch.bfloat16 and got.shape == want.shape
    # Row by row: a huge row must not hide another one's error.
    error = (got.float() - want).abs().amax(1) / want.abs().amax(1).clamp(min=1e-30)
    assert error.max() <= bound, error


@pytest.mark.parametrize("tag", WIRE)
@pytest.mark.parametrize("name", ["reference", "torch", "vllm_cpu"])
def test_backends_that_decode(name, tag):
    reason = BACKENDS[name].load().unavailable(torch.bfloat16, HIDDEN, WIDTH)
    if reason:
        pytest.skip(reason)
    held = weights(Scheme.PLAIN)
    backend = BACKENDS[name].load()((0, EXPERTS))
    backend.prepare(0, *held)
    x, ids, scale = batch(9, adversarial=True)
    rows = EncodedRows.of(x, tag)
    got = backend.forward_encoded(0, rows, ids, scale, torch.bfloat16)
    assert torch.equal(got, backend.forward(0, rows.decode(torch.bfloat16), ids, scale))
    assert_close(got, exact(held, rows, ids, scale), 2**-5)


def triton(held, experts=(0, EXPERTS)):
    backend = TritonBackend(
        experts, EXPERTS, tilings=lambda shape, rows: default_tiling(shape, rows, hip=True)
    )
    backend.prepare(0, *(w[slice(*experts)] for w in held))
    return backend


@pytest.mark.parametrize("experts", [(0, EXPERTS), (2, 5)])
@pytest.mark.parametrize("tag", WIRE)
@pytest.mark.parametrize("scheme", Scheme)
def test_launches_of_the_triton_backend(monkeypatch, scheme, tag, experts):
    fake_kernels.install(monkeypatch)
    held = weights(scheme)
    x, ids, scale = batch(9, adversarial=True)
    rows = EncodedRows.of(x, tag)
    got = triton(held, experts).forward_encoded(0, rows, ids, scale, torch.bfloat16)
    want = exact(held, rows, ids, scale, experts)
    as_they_are = scheme is Scheme.MXFP4 and tag != Tag.E2M1  # bfloat16 x MXFP4
    local = ((ids >= experts[0]) & (ids < experts[1])).any(1)
    assert (got[~local] == 0).all()
    assert_close(got[local], want[local], BOUND[Scheme.PLAIN if as_they_are else scheme])


@pytest.mark.parametrize("scheme", Scheme)
def test_rows_of_dead_peers_are_not_computed(monkeypatch, scheme):
    fake_kernels.install(monkeypatch)
    held = weights(scheme)
    x, ids, scale = batch(8)
    rows = EncodedRows.of(x, {Scheme.FP8_BLOCK: Tag.E4M3FN, Scheme.MXFP4: Tag.E2M1}.get(scheme))
    want = triton(held).forward_encoded(0, rows, ids, scale, torch.bfloat16)
    ids[2:5] = -1
    rows.payload.view(torch.uint8)[2:5] = 0x7F  # unwritten memory: NaN in every format
    if rows.scales is not None:
        rows.scales[2:5] = 255 if scheme is Scheme.MXFP4 else torch.nan
    for name in ("triton", "reference", "torch"):
        backend = triton(held) if name == "triton" else BACKENDS[name].load()((0, EXPERTS))
        backend.prepare(0, *held)
        got = backend.forward_encoded(0, rows, ids, scale, torch.bfloat16)
        assert (got[2:5] == 0).all() and not got.isnan().any()
        if name == "triton":
            assert torch.equal(got[[0, 1, 5, 6, 7]], want[[0, 1, 5, 6, 7]])


@pytest.mark.parametrize("narrow", [WIDTH, 128, 80])
@pytest.mark.parametrize("scheme", Scheme)
def test_a_shared_expert_joins_the_routed_ones(monkeypatch, scheme, narrow):
    fake_kernels.install(monkeypatch)
    held = weights(scheme)
    gate_up = (torch.randn(2 * narrow, HIDDEN) / HIDDEN**0.5).bfloat16()
    down = (torch.randn(HIDDEN, narrow) / narrow**0.5).bfloat16()
    x, ids, scale = batch(9)
    ids[4] = -1
    rows = EncodedRows.of(x, {Scheme.FP8_BLOCK: Tag.E4M3FN, Scheme.MXFP4: Tag.E2M1}.get(scheme))
    backend = triton(held)
    assert backend.prepare_shared(0, Weight.of(gate_up), Weight.of(down))
    assert backend._layers[0].shape.shared == -(-narrow // 128) * 128
    got = backend.forward_encoded(0, rows, ids, scale, torch.bfloat16)
    alone = ReferenceBackend((0, 1))
    shared = [
        in_scheme(w, scheme, Tag.E4M3FN, torch.bfloat16)
        for w in widened(Weight.of(gate_up), Weight.of(down), WIDTH)
    ]
    alone.prepare(0, *(w[None] for w in shared))
    ones = torch.ones(9, 1), torch.zeros(9, 1, dtype=torch.int32)
    want = exact(held, rows, ids, scale)
    want += alone.forward(0, rows.decode(torch.float32), ones[1], ones[0])
    assert_close(got, want, BOUND[scheme])
    # Padding has no effect: the widened expert equals the narrow one, up to rounding.
    if scheme is Scheme.PLAIN:
        plain = ReferenceBackend((0, 1))
        plain.prepare(0, Weight.of(gate_up[None]), Weight.of(down[None]))
        narrow_out = plain.forward(0, x.float(), ones[1], ones[0])
        assert torch.allclose(narrow_out, alone.forward(0, x.float(), ones[1], ones[0]), atol=1e-5)


def test_a_wider_shared_expert_does_not_join(monkeypatch):
    fake_kernels.install(monkeypatch)
    backend = triton(weights(Scheme.PLAIN))
    wide = torch.zeros(4 * WIDTH, HIDDEN), torch.zeros(HIDDEN, 2 * WIDTH)
    assert not backend.prepare_shared(0, *(Weight.of(w) for w in wide))
    assert not ReferenceBackend((0, 1)).prepare_shared(0, *(Weight.of(w) for w in wide))


def test_weights_convert_between_schemes():
    plain = Weight.of(torch.randn(3, 128, 256).bfloat16())
    fp8 = in_scheme(plain, Scheme.FP8_BLOCK, Tag.E4M3FN, torch.bfloat16)
    assert fp8.shape == plain.shape and fp8.nbytes == 3 * 128 * 256 + 3 * 2 * 4
    assert in_scheme(fp8, Scheme.FP8_BLOCK, Tag.E4M3FN, torch.bfloat16) is fp8
    back = in_scheme(fp8, Scheme.PLAIN, Tag.E4M3FN, torch.bfloat16)
    assert (back.codes.float() - plain.codes.float()).abs().max() <= 2**-4 * 5
    mx = in_scheme(fp8, Scheme.MXFP4, Tag.E4M3FN, torch.bfloat16)
    assert mx.shape == plain.shape and mx.scheme is Scheme.MXFP4
    both = with_expert(fp8, fp8[0])
    assert both.shape == (4, 128, 256) and torch.equal(both[3].codes.float(), fp8[0].codes.float())


def test_fp8_weights_for_gfx942_are_the_same_numbers():
    every = torch.arange(256, dtype=torch.uint8).repeat(64).view(1, 128, 128)
    weight = Weight(Tag.E4M3FN, every.view(torch.float8_e4m3fn), torch.full((1, 1, 1), 3.0))
    other = in_scheme(weight, Scheme.FP8_BLOCK, Tag.E4M3FNUZ, torch.bfloat16)
    assert other.tag == Tag.E4M3FNUZ
    a, b = dequantise_weight(weight), dequantise_weight(other)
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def test_which_backend_accepts_which_weights():
    assert choose_backend("auto", torch.bfloat16, 256, 256, scheme=Scheme.FP8_BLOCK) == "torch"
    with pytest.raises(ConfigError, match=r"takes plain weights, not mxfp4 \(ffn.weights\)"):
        choose_backend("vllm_cpu", torch.bfloat16, 256, 256, scheme=Scheme.MXFP4)
    with pytest.raises(ConfigError, match=r"sizes divisible by 128.*use ffn.weights: plain"):
        quantise_weight(torch.zeros(1, 64, 64), Tag.E4M3FN)


SIZES = {"hidden": 128, "layers": 2, "experts": 4, "intermediate": 128, "vocab": 512}
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """(bfloat16, FP8 by blocks) checkpoints of two families, experts only."""
    root = tmp_path_factory.mktemp("fp8")
    for name in ("deepseek_v3", "step3"):
        make_model(name, root / name, resolve(name, "tiny", **SIZES), seed=3)
        family, _ = read_model(root / name)
        stored = load_file(root / name / "model.safetensors")
        for tensor in [n for n in stored if family.is_expert_weight(n)]:
            weight = quantise_weight(stored[tensor].float(), Tag.E4M3FN)
            stored[tensor], stored[tensor + "_scale_inv"] = weight.codes, weight.scales
        rewrite(root / name, root / f"{name}-fp8", stored, FP8_CONFIG)
    return root


def rewrite(source, target, stored, quantization):
    target.mkdir(exist_ok=True)
    save_file(stored, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize("name", ["deepseek_v3", "step3"])
def test_fp8_checkpoints_stay_fp8(checkpoints, name, instances):
    path = checkpoints / f"{name}-fp8"
    family, model = read_model(path)
    table = tensor_table(path)
    loaded = [
        load_shard(path, family, model, shard_of(model, instances, j), scheme=Scheme.FP8_BLOCK)
        for j in range(instances)
    ]
    for layer in model.moe_layers:
        parts = [shard.layers[layer] for shard in loaded]
        assert {part.w13.tag for part in parts} == {Tag.E4M3FN}
        whole = instances == 1 and family.shared_names is not None
        assert all((p.shared_down.scheme is Scheme.FP8_BLOCK) is whole for p in parts)
    expert_bytes = sum(t.nbytes for n, t in table.items() if family.is_expert_weight(n))
    if instances == 1:
        assert loaded[0].bytes_read == expert_bytes
    x = torch.randn(7, model.hidden).bfloat16()
    ids = torch.stack([torch.randperm(4)[: model.top_k] for _ in range(7)]).int()
    scale = torch.rand(7, model.top_k)

    def run(folder, **options):
        each = [
            load_ffn_model(folder, family, model, instances=instances, index=j, **options)
            for j in range(instances)
        ]
        layer = model.moe_layers[0]
        return each, sum(part.forward(layer, x, ids, scale).float() for part in each)

    _, plain = run(checkpoints / name, backend="reference")
    each, got = run(path, backend="reference")
    assert {part.banks.scheme for part in each} == {Scheme.FP8_BLOCK}
    assert sum(part.weight_bytes for part in each) < 0.6 * 2 * expert_bytes + 2**18
    bound = plain.abs().max()
    assert 1e-4 * bound < (got - plain).abs().max() <= 0.08 * bound
    for options in ({"backend": "torch"}, {"weights": "plain"}):
        _, other = run(path, **options)
        assert (other - got).abs().max() <= 2**-5 * bound
    (first, *_), four = run(checkpoints / name, backend="torch", weights="mxfp4")
    assert first.banks.scheme is Scheme.MXFP4 and (four - plain).abs().max() <= 0.5 * bound
    (first, *_), random = run(checkpoints / name, dummy=True, weights="fp8_block")
    assert first.banks.scheme is Scheme.FP8_BLOCK and random.isfinite().all()


def test_errors_name_the_tensors_of_broken_fp8_checkpoints(checkpoints, tmp_path):
    source = checkpoints / "deepseek_v3-fp8"
    family, model = read_model(source)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"

    def load(change, quantization=FP8_CONFIG):
        stored = load_file(source / "model.safetensors")
        change(stored)
        rewrite(source, tmp_path, stored, quantization)
        read_model(tmp_path)
        load_shard(tmp_path, family, model, shard_of(model, 1, 0))

    def lose_scale(stored):
        del stored[name + "_scale_inv"]

    def one_plain(stored):
        stored[name] = stored[name].bfloat16()

    with pytest.raises(ConfigError, match=f"has no tensor {name}_scale_inv; finish or repeat"):
        load(lose_scale)
    with pytest.raises(
        ConfigError,
        match=rf"{name} of .* is stored as plain and .*fp8_block; .* must be stored alike",
    ):
        load(one_plain)
    with pytest.raises(ConfigError, match="is quantised in a format that is not supported"):
        load(lambda stored: None, {"quant_method": "bitsandbytes"})
