"""The Triton MoE backend on a GPU, compared with the reference on the same quantised weights."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from ffn_worker.moe.device import native_fp8  # noqa: E402
from ffn_worker.moe.quantise import Weight, in_scheme, widened  # noqa: E402
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.sorting import sort_pairs, sort_pairs_on_gpu  # noqa: E402
from ffn_worker.moe.tiles import Tile, Tiling  # noqa: E402
from ffn_worker.moe.triton import TritonBackend  # noqa: E402

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 512, 384
FP8 = native_fp8()
# Largest error relative to the largest value of the exact result. With FP8 and MXFP4 rows, the
# activations between the two products are rounded too.
BOUND = {Scheme.PLAIN: 2**-6, Scheme.FP8_BLOCK: 0.06, Scheme.MXFP4: 0.3}


def problem(rows, scheme, seed=0, experts=(0, EXPERTS)):
    """Returns weights of ``experts`` on the CPU, rows, ids and router weights."""
    torch.manual_seed(seed)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    w2 = torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5
    held = [
        in_scheme(Weight.of(w[slice(*experts)].bfloat16()), scheme, FP8, torch.bfloat16)
        for w in (w13, w2)
    ]
    x = torch.randn(rows, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(rows)]).int()
    return held, x, ids, torch.rand(rows, TOP_K)


def exact(held, experts, x, ids, scale):
    reference = ReferenceBackend(experts)
    reference.prepare(0, *held)
    return reference.forward(0, x.float(), ids, scale)


def triton(held, experts=(0, EXPERTS), tilings=None):
    backend = TritonBackend(experts, EXPERTS, tilings=tilings)
    backend.prepare(0, *(w.to(torch.device("cuda")) for w in held))
    return backend


def close(got, want, bound):
    error = (got.float().cpu() - want).abs().max() / want.abs().max()
    assert error <= bound, float(error)


@pytest.mark.parametrize("experts", [(0, EXPERTS), (5, 9)])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("scheme", Scheme)
def test_forward(scheme, rows, experts):
    held, x, ids, scale = problem(rows, scheme, experts=experts)
    got = triton(held, experts).forward(0, x.cuda(), ids.cuda(), scale.cuda())
    # MXFP4 weights multiply bfloat16 rows without conversion.
    bound = 2**-6 if scheme is Scheme.MXFP4 else BOUND[scheme]
    close(got, exact(held, experts, x, ids, scale), bound)


@pytest.mark.parametrize("m", [16, 32, 64])
def test_weights_times_rows(m):
    """FP8 products where the kernel swaps the operands."""
    held, x, ids, scale = problem(40, Scheme.FP8_BLOCK)
    tile = Tile(128, 128, 1, 4, 3, swap=True)
    backend = triton(held, tilings=lambda shape, rows: Tiling(m, tile, tile))
    got = backend.forward(0, x.cuda(), ids.cuda(), scale.cuda())
    close(got, exact(held, (0, EXPERTS), x, ids, scale), BOUND[Scheme.FP8_BLOCK])


@pytest.mark.parametrize("scheme", [Scheme.FP8_BLOCK, Scheme.MXFP4])
def test_rows_as_the_wire_brings_them(scheme):
    held, x, ids, scale = problem(33, scheme)
    rows = EncodedRows.of(x, Tag.E2M1 if scheme is Scheme.MXFP4 else FP8)
    there = EncodedRows(rows.tag, rows.payload.cuda(), rows.scales.cuda())
    got = triton(held).forward_encoded(0, there, ids.cuda(), scale.cuda(), torch.bfloat16)
    close(got, exact(held, (0, EXPERTS), rows.decode(torch.float32), ids, scale), BOUND[scheme])


@pytest.mark.parametrize("narrow", [WIDTH, 80])
@pytest.mark.parametrize("scheme", Scheme)
def test_a_shared_expert_joins(scheme, narrow):
    held, x, ids, scale = problem(130, scheme)
    gate_up = Weight.of((torch.randn(2 * narrow, HIDDEN) / HIDDEN**0.5).bfloat16())
    down = Weight.of((torch.randn(HIDDEN, narrow) / narrow**0.5).bfloat16())
    backend = triton(held)
    cuda = torch.device("cuda")
    assert backend.prepare_shared(0, gate_up.to(cuda), down.to(cuda))
    got = backend.forward(0, x.cuda(), ids.cuda(), scale.cuda())
    alone = ReferenceBackend((0, 1))
    wide = [in_scheme(w, scheme, FP8, torch.bfloat16) for w in widened(gate_up, down, WIDTH)]
    alone.prepare(0, *(w[None] for w in wide))
    ones, zeros = torch.ones(130, 1), torch.zeros(130, 1, dtype=torch.int32)
    want = exact(held, (0, EXPERTS), x, ids, scale) + alone.forward(0, x.float(), zeros, ones)
    close(got, want, 2**-6 if scheme is Scheme.MXFP4 else BOUND[scheme])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("experts", [(0, EXPERTS), (5, 9)])
@pytest.mark.parametrize("rows", [1, 300, 3000])
def test_sorting(rows, experts, shared):
    ids = problem(rows, Scheme.PLAIN)[2]
    ids[0, 1] = -1
    got = sort_pairs_on_gpu(ids.cuda(), *experts, 16, shared=shared)
    want = sort_pairs(ids, *experts, 16, shared=shared)
    used = int(want.used)
    assert int(got.used) == used
    assert torch.equal(got.pairs[:used].cpu(), want.pairs[:used])
    assert torch.equal(got.experts[: used // 16].cpu(), want.experts[: used // 16])


def test_masked_pairs_and_a_graph():
    held, x, ids, scale = problem(16, Scheme.PLAIN)
    ids[3] = -1
    x[3] = torch.nan
    backend = triton(held)
    inputs = [t.cuda() for t in (x, ids, scale)]
    eager = backend.forward(0, *inputs)
    assert (eager[3] == 0).all() and not eager.isnan().any()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = backend.forward(0, *inputs)
    for kept, new in zip(inputs, problem(16, Scheme.PLAIN, seed=1)[1:], strict=True):
        kept.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, backend.forward(0, *inputs))
