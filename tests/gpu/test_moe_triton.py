"""The Triton MoE backend on a GPU against the reference backend on the same quantised weights."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire.codecs_torch import (  # noqa: E402
    dequantise_fp8,
    dequantise_mxfp4,
    quantise_fp8,
    quantise_mxfp4,
)
from afd.wire.layout import Tag  # noqa: E402
from ffn_worker.moe.quantise import dequantise_weight, quantise_weight  # noqa: E402
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.triton import TritonBackend  # noqa: E402

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 512, 384
FP8 = (
    Tag.E4M3FNUZ
    if torch.version.hip and "gfx942" in (torch.cuda.get_device_properties(0).gcnArchName)
    else Tag.E4M3FN
)
# Largest error, relative to the largest value of the exact result. FP8 and MXFP4 rows also round
# the activations between the two products.
BOUND = {None: 2**-6, FP8: 0.06, Tag.E2M1: 0.3}


def problem(rows, seed=0):
    torch.manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    x = torch.randn(rows, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).int()
    return w13.bfloat16(), w2.bfloat16(), x, ids, torch.rand(rows, TOP_K)


def exact(w13, w2, tag, experts, x, ids, scale):
    if tag is not None:
        w13, w2 = (dequantise_weight(quantise_weight(w, tag)) for w in (w13, w2))
    reference = ReferenceBackend(experts)
    reference.prepare(0, w13[slice(*experts)].float(), w2[slice(*experts)].float())
    return reference.forward(0, x.float(), ids, scale)


def close(got, want, bound):
    error = (got.float().cpu() - want).abs().max() / want.abs().max()
    assert error <= bound, float(error)


@pytest.mark.parametrize("experts", [(0, EXPERTS), (5, 9)])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("tag", BOUND, ids=lambda t: t.name if t else "plain")
def test_forward(tag, rows, experts):
    w13, w2, x, ids, scale = problem(rows)
    backend = TritonBackend(experts, EXPERTS, tag=tag)
    backend.prepare(0, w13[slice(*experts)].cuda(), w2[slice(*experts)].cuda())
    got = backend.forward(0, x.cuda(), ids.cuda(), scale.cuda())
    close(
        got, exact(w13, w2, tag, experts, x, ids, scale), 2**-6 if tag == Tag.E2M1 else BOUND[tag]
    )


@pytest.mark.parametrize("tag", [FP8, Tag.E2M1], ids=lambda t: t.name)
def test_rows_as_the_wire_brings_them(tag):
    w13, w2, x, ids, scale = problem(33)
    if tag == Tag.E2M1:
        codes, scales = quantise_mxfp4(x)
        back = dequantise_mxfp4(codes, scales, torch.float32)
    else:
        codes, scales = quantise_fp8(x, tag)
        back = dequantise_fp8(codes, scales, torch.float32)
    backend = TritonBackend((0, EXPERTS), EXPERTS, tag=tag)
    backend.prepare(0, w13.cuda(), w2.cuda())
    got = backend.run(0, codes.cuda(), ids.cuda(), scale.cuda(), scales=scales.cuda())
    close(got, exact(w13, w2, tag, (0, EXPERTS), back, ids, scale), BOUND[tag])


def test_masked_pairs_and_a_graph():
    w13, w2, x, ids, scale = problem(16)
    ids[3] = -1
    x[3] = torch.nan
    backend = TritonBackend((0, EXPERTS), EXPERTS)
    backend.prepare(0, w13.cuda(), w2.cuda())
    inputs = [t.cuda() for t in (x, ids, scale)]
    eager = backend.forward(0, *inputs)
    assert (eager[3] == 0).all() and not eager.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.forward(0, *inputs)
    other = problem(16, seed=1)
    for held, new in zip(inputs, other[2:], strict=True):
        held.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, backend.forward(0, *inputs))
