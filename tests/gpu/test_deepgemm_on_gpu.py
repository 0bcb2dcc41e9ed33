"""The DeepGEMM backend on a Hopper GPU against the reference backend on the same weights."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from ffn_worker.moe import hopper  # noqa: E402
from ffn_worker.moe.batch_selection import Selection, SelectionByMode  # noqa: E402
from ffn_worker.moe.deep_gemm import DeepGemmBackend  # noqa: E402
from ffn_worker.moe.device import launched_as  # noqa: E402
from ffn_worker.moe.grouped import GroupedBackend, cannot_compile  # noqa: E402
from ffn_worker.moe.hopper import HopperBackend  # noqa: E402
from ffn_worker.moe.load_counts import SlotLoad  # noqa: E402
from ffn_worker.moe.quantise import (  # noqa: E402
    Weight,
    dequantise_weight,
    in_scheme,
    widened,
)
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.sorting import place_pairs, place_pairs_on_gpu  # noqa: E402
from ffn_worker.moe.triton import TritonBackend  # noqa: E402

HIDDEN, WIDTH, TOP_K = 512, 384, 4
REASON = DeepGemmBackend.unavailable(torch.bfloat16, HIDDEN, WIDTH)
if REASON is not None:
    pytest.skip(REASON, allow_module_level=True)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
KINDS = [DeepGemmBackend, GroupedBackend][: 2 if cannot_compile() is None else 1]
BOUND, PLAIN_BOUND = 0.1, 2**-5
"""Error bounds relative to a row's largest value. With FP8, activations are rounded like rows."""


def fp8(weight):
    return in_scheme(Weight.of(weight.bfloat16()), Scheme.FP8_BLOCK, Tag.E4M3FN, torch.bfloat16)


def weights(experts, seed=0):
    torch.manual_seed(seed)
    w13 = torch.randn(experts, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    return fp8(w13), fp8(torch.randn(experts, HIDDEN, WIDTH) / WIDTH**0.5)


def in_plain(held):
    return tuple(Weight.of(dequantise_weight(weight).bfloat16()) for weight in held)


def batch(rows, experts, seed=0):
    torch.manual_seed(seed)
    ids = torch.rand(rows, experts).topk(min(TOP_K, experts)).indices.int()
    return torch.randn(rows, HIDDEN).bfloat16(), ids, torch.rand(ids.shape)


def encoded(x):
    rows = EncodedRows.of(x, Tag.E4M3FN)
    return rows, EncodedRows(rows.tag, rows.payload.cuda(), rows.scales.cuda())


def backend(held, experts, every, kind=DeepGemmBackend):
    made = kind(experts, every)
    made.prepare(0, *(w[slice(*experts)].to(CUDA) for w in held))
    return made


def exact(held, experts, x, ids, scale):
    reference = ReferenceBackend(experts)
    reference.prepare(0, *(w[slice(*experts)] for w in held))
    return reference.forward(0, x, ids, scale)


def close(got, want, bound=BOUND):
    error = (got.float().cpu() - want).abs().amax(1) / want.abs().amax(1).clamp(min=1e-20)
    assert error.max() <= bound, float(error.max())


@pytest.mark.parametrize(
    ("every", "experts"), [(1, (0, 1)), (8, (0, 8)), (48, (0, 24)), (48, (24, 48)), (160, (3, 160))]
)
@pytest.mark.parametrize("rows", [1, 63, 300, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_as_the_wire_brings_them(rows, every, experts, kind):
    held = weights(every)
    x, ids, scale = batch(rows, every)
    rows, there = encoded(x)
    made = backend(held, experts, every, kind)
    got = made.forward_encoded(0, there, ids.cuda(), scale.cuda(), torch.bfloat16)
    close(got, exact(held, experts, rows.decode(torch.float32), ids, scale))


@pytest.mark.parametrize(("every", "experts"), [(8, (0, 8)), (48, (24, 48))])
@pytest.mark.parametrize("rows", [1, 300, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights(rows, every, experts, kind):
    held = in_plain(weights(every))
    x, ids, scale = batch(rows, every)
    ids[::5] = -1
    given, there = encoded(x)
    made = backend(held, experts, every, kind)
    got = made.forward(0, x.cuda(), ids.cuda(), scale.cuda())
    close(got, exact(held, experts, x.float(), ids, scale), PLAIN_BOUND)
    got = made.forward_encoded(0, there, ids.cuda(), scale.cuda(), torch.bfloat16)
    decoded = given.decode(torch.float32)
    close(got, exact(held, experts, decoded, ids, scale), PLAIN_BOUND)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_bfloat16_weights_with_other_routing(kind):
    held, rows = in_plain(weights(24)), 700
    made = backend(held, (0, 12), 24, kind)
    inputs = [part.cuda() for part in batch(rows, 24)]
    made.forward(0, *inputs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = made.forward(0, *inputs)
    for seed in (1, 2):
        parts = batch(rows, 24, seed)
        parts[1][: rows // 2] = 4 if seed == 2 else -1
        for kept, value in zip(inputs, parts, strict=True):
            kept.copy_(value)
        graph.replay()
        torch.cuda.synchronize()
        x, ids, scale = parts
        close(captured, exact(held, (0, 12), x.float(), ids, scale), PLAIN_BOUND)


def test_rows_in_bfloat16():
    held = weights(8)
    x, ids, scale = batch(130, 8)
    got = backend(held, (0, 8), 8).forward(0, x.cuda(), ids.cuda(), scale.cuda())
    close(got, exact(held, (0, 8), x.float(), ids, scale))


@pytest.mark.parametrize("rows", [100, 1000])
@pytest.mark.parametrize("which", ["one expert gets all", "empty experts", "no pairs"])
def test_extreme_routing(which, rows):
    held = weights(8)
    x, ids, scale = batch(rows, 8)
    if which == "one expert gets all":
        ids[:] = torch.tensor([5, -1, -1, -1], dtype=torch.int32)
    elif which == "empty experts":
        ids = ids // 2 * 2  # a row may select the same expert twice: two pairs
    else:
        ids[:] = -1
    rows, there = encoded(x)
    got = backend(held, (0, 8), 8).forward_encoded(
        0, there, ids.cuda(), scale.cuda(), torch.bfloat16
    )
    close(got, exact(held, (0, 8), rows.decode(torch.float32), ids, scale))


def shared_expert(made, width):
    """Adds a shared expert to ``made``. Returns a function that computes its part as reference."""
    torch.manual_seed(width)
    gate_up = Weight.of((torch.randn(2 * width, HIDDEN) / HIDDEN**0.5).bfloat16())
    down = Weight.of((torch.randn(HIDDEN, width) / width**0.5).bfloat16())
    assert made.prepare_shared(0, gate_up.to(CUDA), down.to(CUDA))
    wide = [fp8(w.codes)[None] for w in widened(gate_up, down, -(-width // 128) * 128)]

    def alone(exactly):
        ones, zeros = torch.ones(len(exactly), 1), torch.zeros(len(exactly), 1, dtype=torch.int32)
        return exact(wide, (0, 1), exactly, zeros, ones)

    return alone


@pytest.mark.parametrize("rows", [1, 301])
def test_a_shared_expert_beside_bfloat16_weights(rows):
    held = in_plain(weights(8))
    x, ids, scale = batch(rows, 8)
    made = backend(held, (2, 6), 8)
    torch.manual_seed(7)
    shared = torch.randn(400, HIDDEN) / HIDDEN**0.5, torch.randn(HIDDEN, 200) / 200**0.5
    gate_up, down = (Weight.of(weight.bfloat16()) for weight in shared)
    assert made.prepare_shared(0, gate_up.to(CUDA), down.to(CUDA))
    alone = [Weight.of(weight.codes[None]) for weight in (gate_up, down)]
    every = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
    got = made.forward(0, x.cuda(), ids.cuda(), scale.cuda())
    want = exact(held, (2, 6), x.float(), ids, scale) + exact(alone, (0, 1), x.float(), *every)
    close(got, want, PLAIN_BOUND)


@pytest.mark.parametrize("width", [WIDTH, 200, 640])
@pytest.mark.parametrize("rows", [1, 300, 1500])
def test_a_shared_expert_is_added_to_the_routed_ones(rows, width):
    held, load = weights(8), SlotLoad(range(4), 2, CUDA)
    x, ids, scale = batch(rows, 8)
    rows, there = encoded(x)
    made = backend(held, (2, 6), 8)
    alone = shared_expert(made, width)
    got = made.forward_encoded(0, there, ids.cuda(), scale.cuda(), torch.bfloat16, load)
    exactly = rows.decode(torch.float32)
    close(got, exact(held, (2, 6), exactly, ids, scale) + alone(exactly))
    assert load.added_to([0] * 4) == tuple(int((ids == e).sum()) for e in range(2, 6))


def test_nan_stays_in_its_row_and_masked_rows_are_zero():
    held = weights(8)
    x, ids, scale = batch(200, 8)
    x[3], x[7, 5], ids[3] = torch.nan, torch.nan, -1
    there = encoded(x)[1]
    there.payload.view(torch.uint8)[3] = 0x7F
    got = backend(held, (0, 8), 8).forward_encoded(
        0, there, ids.cuda(), scale.cuda(), torch.bfloat16
    )
    assert (got[3] == 0).all() and got[7].isnan().all()
    assert got.isnan().any(1).sum() == 1


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("rows", [48, 700])
@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_with_other_routing(rows, shared, kind):
    held = weights(24)
    made = backend(held, (0, 12), 24, kind)
    alone = shared_expert(made, 200) if shared else torch.zeros_like
    x, ids, scale = batch(rows, 24)
    there = encoded(x)[1]
    inputs = [there.payload, there.scales, ids.cuda(), scale.cuda()]

    def forward():
        given = EncodedRows(Tag.E4M3FN, *inputs[:2])
        return made.forward_encoded(0, given, *inputs[2:], torch.bfloat16)

    forward()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for seed in (1, 2, 3):
        x, ids, scale = batch(rows, 24, seed)
        if seed == 2:
            ids[: rows // 2] = 4  # many more pairs of one expert than at capture
        if seed == 3:
            ids[5:] = -1
        new, there = encoded(x)
        for kept, value in zip(
            inputs, (there.payload, there.scales, ids.cuda(), scale.cuda()), strict=True
        ):
            kept.view(torch.uint8).copy_(value.view(torch.uint8))
        graph.replay()
        torch.cuda.synchronize()
        exactly = new.decode(torch.float32)
        close(captured, exact(held, (0, 12), exactly, ids, scale) + alone(exactly))
        assert torch.equal(captured, forward())  # the order of additions is deterministic


@pytest.mark.parametrize("experts", [(0, 16), (5, 9)])
@pytest.mark.parametrize("rows", [1, 300, 3000])
def test_pair_slots(rows, experts):
    ids = batch(rows, 16)[1]
    ids[0, 1] = -1
    load = torch.full((experts[1] - experts[0],), 2**40, device=CUDA)
    got = place_pairs_on_gpu(ids.cuda(), *experts, 64, load)
    want = place_pairs(ids, *experts, 64)
    assert torch.equal(got.slots.cpu(), want.slots) and torch.equal(got.ends.cpu(), want.ends)
    here = want.slots[want.slots >= 0].long()
    assert torch.equal(got.pairs.cpu()[here], want.pairs[here])
    counts = [int((ids == e).sum()) for e in range(*experts)]
    assert (load - 2**40).tolist() == counts


@pytest.mark.parametrize("name", ["triton", "deep_gemm", "grouped", "vllm_cuda"])
@pytest.mark.parametrize("plain", [False, True])
def test_hopper_runs_whichever_backend_is_selected(monkeypatch, plain, name):
    held = in_plain(weights(8)) if plain else weights(8)
    every = dict.fromkeys(("plain", "fp8_block"), ((0, name),))
    monkeypatch.setattr(
        hopper, "selection_of", lambda _: SelectionByMode(*[Selection(schemes=every)] * 2)
    )
    x, ids, scale = batch(300, 8)
    made = HopperBackend((0, 8), 8)
    made.prepare(0, *(w.to(CUDA) for w in held))
    exactly, there = encoded(x)
    got = made.forward_encoded(0, there, ids.cuda(), scale.cuda(), torch.bfloat16)
    close(got, exact(held, (0, 8), exactly.decode(torch.float32), ids, scale))


@pytest.mark.parametrize("plain", [False, True])
def test_graph_and_eager_calls_use_their_own_selection(monkeypatch, plain):
    """Graph and eager calls select backends separately. Nothing is compiled during the capture."""
    held, called = in_plain(weights(8)) if plain else weights(8), []
    always = {
        name: Selection(schemes=dict.fromkeys(("plain", "fp8_block"), ((0, name),)))
        for name in ("triton", "grouped")
    }
    by_mode = SelectionByMode(graph=always["grouped"], eager=always["triton"])
    monkeypatch.setattr(hopper, "selection_of", lambda _: by_mode)
    for kind in (TritonBackend, DeepGemmBackend):

        def told(*args, kind=kind, compute=kind._compute):
            called.append(kind)
            compute(*args)

        monkeypatch.setattr(kind, "_compute", told)
    made = HopperBackend((0, 8), 8)
    made.prepare(0, *(w.to(CUDA) for w in held))
    x, ids, scale = batch(48, 8)
    exactly, there = encoded(x)
    inputs = ids.cuda(), scale.cuda()

    def forward():
        return made.forward_encoded(0, there, *inputs, torch.bfloat16)

    for mode in ("eager", "graph"):
        with launched_as(mode):
            forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    graph.replay()
    launched = forward()
    assert called == [TritonBackend, DeepGemmBackend, DeepGemmBackend, TritonBackend]
    want = exact(held, (0, 8), exactly.decode(torch.float32), ids, scale)
    close(captured, want)
    close(launched, want)
