"""Kernels that handle several messages per launch, and kernels around an attention layer's
products, on a GPU: equal to their references, eager and in a captured graph."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire import slot_view_torch  # noqa: E402
from afd.wire.layout import layouts  # noqa: E402
from afd.wire.slot_torch import (  # noqa: E402
    PlacedAnswers,
    sum_of_parts,
    take_bucket,
    take_rows,
)
from afd.wire.slot_view_torch import RoutedRows, SlotView  # noqa: E402
from afd.wire.streams_torch import make_streams  # noqa: E402
from afd_bench.step3 import fused_kernels as fused  # noqa: E402
from attention_worker.kernels import fused_attention as served  # noqa: E402
from attention_worker.remote.encoded_batch import EncodedBatch, encode  # noqa: E402
from attention_worker.remote.stream_dispatch import StreamSplitter  # noqa: E402

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
FP8 = torch.float8_e4m3fn


def raw(tensor):
    return tensor.view(torch.uint8).cpu()


def views_of(layout, order):
    memory = torch.randint(0, 120, (max(order) + 1, layout.nbytes), dtype=torch.uint8)
    there = memory.cuda()
    return [[SlotView(m[slot], layout) for slot in order] for m in (memory, there)]


@pytest.mark.parametrize("wire", ["exact", "fp8", "mxfp4"])
@pytest.mark.parametrize("counts", [[128, 128], [5, 0, 7], [3, 1, 2, 4, 1, 2, 3, 4, 5, 6]])
def test_rows_of_several_messages(wire, counts):
    layout, _ = layouts(wire, "bfloat16", 128, 7168, 3)
    order = [(7 * i + 2) % 11 for i in range(len(counts))]
    here, there = views_of(layout, order)
    want, got = (RoutedRows.empty_like(views[0], sum(counts)) for views in (here, there))
    take_rows(here, counts, want, {1, len(counts) - 1})
    take_rows(there, counts, got, {1, len(counts) - 1})
    pairs = [(want.x.payload, got.x.payload), (want.ids, got.ids), (want.weights, got.weights)]
    if want.x.scales is not None:
        pairs.append((want.x.scales, got.x.scales))
    for mine, theirs in pairs:
        assert torch.equal(raw(mine), raw(theirs))


@pytest.mark.parametrize("wire", ["exact", "fp8", "mxfp4"])
@pytest.mark.parametrize("counts", [[128], [5, 0, 7], [3, 1, 2, 4, 1, 2, 3, 4, 5, 6]])
@pytest.mark.parametrize("tp", [1, 3])
def test_rows_of_a_bucket(wire, counts, tp):
    layout, _ = layouts(wire, "bfloat16", 128, 7168, 3)
    here, there = views_of(layout, [2 * i + 1 for i in range(len(counts))])
    bucket, table = max(counts) + 1, torch.tensor(counts, dtype=torch.int32)
    want, got = (RoutedRows.empty_like(v[0], len(counts) * bucket) for v in (here, there))
    take_bucket(here, table, bucket, tp, want)
    take_bucket(there, table.cuda(), bucket, tp, got)
    pairs = [(want.x.payload, got.x.payload), (want.ids, got.ids), (want.weights, got.weights)]
    if want.x.scales is not None:
        pairs.append((want.x.scales, got.x.scales))
    for mine, theirs in pairs:
        assert torch.equal(raw(mine), raw(theirs))


@pytest.mark.parametrize("wire", ["exact", "mxfp4"])
@pytest.mark.parametrize("count", [2, 3, 8, 9])
def test_sums_of_answers(wire, count):
    _, layout = layouts(wire, "bfloat16", 16, 7168, 3)
    memory = torch.zeros((count, layout.nbytes), dtype=torch.uint8)
    for part in memory:
        view = SlotView(part, layout)
        raw_values = torch.randn(16, 7168)
        view.payload.copy_(raw_values.to(view.payload.dtype))
        if view.scales is not None:
            view.scales.uniform_()
    here, there = ([SlotView(part, layout) for part in m] for m in (memory, memory.cuda()))
    want = sum_of_parts(here, 13, torch.bfloat16)
    got = sum_of_parts(there, 13, torch.bfloat16)
    if wire == "exact":
        assert torch.equal(got.cpu(), want)
    else:  # a fused multiply-add may round product and sum together
        torch.testing.assert_close(got.cpu(), want, rtol=2**-7, atol=1e-3)


def product(rows, columns):
    return fused.Product(
        torch.randn(rows, columns, device=DEVICE).bfloat16(),
        torch.rand(rows, 1, device=DEVICE) + 0.5,
        torch.rand(columns, device=DEVICE) + 0.5,
    )


def values(quantised):
    codes, scale = quantised
    return codes.float() * scale


def test_answers_are_summed_normalised_and_quantised():
    _, layout = layouts("exact", "bfloat16", 128, 7168, 3)
    memory = torch.empty((4, layout.nbytes), dtype=torch.uint8, device=DEVICE)
    parts = [SlotView(memory[slot], layout).payload[:100] for slot in (2, 0)]
    for part in parts:
        part.copy_(torch.randn(100, 7168))
    residual = torch.randn(100, 7168, device=DEVICE).bfloat16()
    weight, again = torch.randn(7168, device=DEVICE).bfloat16(), residual.clone()
    for given in (parts, parts[:1]):
        got = fused.sum_norm_quantise(given, residual, weight, 1e-5, FP8)
        want = fused.plain_sum_norm_quantise(given, again, weight, 1e-5, FP8)
        assert torch.equal(residual, again)
        torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0)
        difference = (values(got) - values(want)).abs()
        assert (difference <= values(want).abs() / 8 + want[1] / 64).all()
        assert difference.mean() <= 1e-3 * values(want).abs().mean()


def test_a_product_is_added_and_normalised():
    given, weight = product(100, 7168), torch.randn(7168, device=DEVICE).bfloat16()
    residual = torch.randn(100, 7168, device=DEVICE).bfloat16()
    again = residual.clone()
    got = fused.add_norm(given, residual, weight, 1e-5)
    want = fused.plain_add_norm(given, again, weight, 1e-5)
    close(residual, again)
    close(got, want)


def test_rows_are_quantised():
    x = torch.randn(100, 16384, device=DEVICE).bfloat16()
    x[1], x[2, 7], x[3, 8] = 0, torch.nan, torch.inf
    got, want = fused.quantise_rows(x, FP8), fused.plain_quantise_rows(x, FP8)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=0, equal_nan=True)
    fine = [row for row in range(100) if row not in (2, 3)]
    close(got[0][fine], want[0][fine])


@pytest.mark.parametrize("kind", [FP8, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 2])
def test_keys_and_queries_are_rotated(kind, heads):
    rows, low, width, page = 100, 2048, 256, 64
    qkv = product(rows, low + 2 * heads * width)
    weight = torch.randn(low, device=DEVICE).bfloat16()
    angles = torch.rand(50, width, device=DEVICE).bfloat16()
    rope = served.Rope(angles, torch.randint(0, 50, (rows,), device=DEVICE))
    slots = torch.randperm(4 * page, device=DEVICE)[:rows]
    slots[7] = -1
    scales = tuple(torch.tensor([s], device=DEVICE) for s in (0.5, 0.25))
    caches = [
        served.PagedCache(
            *(torch.zeros(2, 4, page, heads, width, device=DEVICE).to(kind)), scales, slots
        )
        for _ in range(2)
    ]
    got = fused.norm_store(qkv, weight, 1e-5, rope, caches[0], FP8)
    want = fused.plain_norm_store(qkv, weight, 1e-5, rope, caches[1], FP8)
    assert (values(got) - values(want)).abs().mean() <= 1e-3 * values(want).abs().mean()
    close(caches[0].keys, caches[1].keys)
    close(caches[0].values, caches[1].values)
    q = product(rows, 64 * width)
    got = fused.rope_quantise(q, width, rope, scales[0], kind)
    close(got, fused.plain_rope_quantise(q, width, rope, scales[0], kind))


def close(mine, theirs):
    """Asserts that at most 1% of the values differ, each by at most one step of the dtype."""
    difference = (mine.float() - theirs.float()).abs()
    step = 2**-3 if mine.dtype == FP8 else 2**-7
    assert (difference <= theirs.float().abs() * step + 2**-6).all()
    assert (difference > 0).float().mean() < 0.01


@pytest.mark.parametrize("copies", [1, 3])
def test_expert_ids_are_mapped_to_slots(copies):
    from attention_worker.remote.expert_slots import ExpertSlotMap, LayerSlots

    ids = torch.randint(-1, 48, (100, 3), dtype=torch.int32)
    table = torch.randint(0, 99, (49, copies), dtype=torch.int32)
    count = torch.randint(1, copies + 1, (49,), dtype=torch.int32)
    table[-1], count[-1] = -1, 1
    slots = object.__new__(ExpertSlotMap)
    slots._index, slots._in_order = 2, set()
    found = []
    for device in ("cpu", "cuda"):
        many = None if copies == 1 else count.to(device)
        slots._layers = {0: LayerSlots(table.to(device), many)}
        found.append(slots.of(0, ids.to(device)).cpu())
    assert torch.equal(*found)


def test_work_on_the_copying_stream_of_a_graph():
    """In each replay the work runs after everything before the fork and ends before the join."""
    streams = make_streams(DEVICE)
    x = torch.zeros(1024, 1024, device=DEVICE)
    w = torch.eye(1024, device=DEVICE)
    with streams.copying():
        x @ w  # allocates the library's workspace for this stream
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with streams.capturable(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        x += 1
        streams.fork()
        with streams.copying():
            beside = (x @ w) * 2
        after = x * 3
        streams.join()
        total = beside + after
    for replay in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        assert (total == 5 * replay).all()


def test_a_launch_takes_the_documented_number_of_messages():
    from afd.wire.slot_triton import FAR

    assert len(FAR) == slot_view_torch.MOST - 1


def test_micro_batches_run_on_their_own_streams_in_a_graph():
    """Each micro-batch continues after its own message, concurrently with the others; the join
    waits for all."""
    streams = make_streams(DEVICE, 3)
    sent, got = (torch.zeros(3, device=DEVICE) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    with streams.capturable(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        sent.zero_()
        streams.begin_step(3)
        for _layer in range(4):
            for micro_batch in range(3):
                with streams.apart(micro_batch):
                    torch.cuda._sleep(300_000 * (3 - micro_batch))
                    got[micro_batch] += sent[micro_batch] + 1
                    streams.fork()
                    with streams.copying():
                        sent[micro_batch].copy_(got[micro_batch])
        streams.join()
        total = got + sent
    for replay in range(1, 4):
        before = got.clone()
        graph.replay()
        torch.cuda.synchronize()
        # Layer 1 gives before + 1; each of the three further layers gives 2 * x + 1.
        want = 8 * (before + 1) + 7
        assert torch.equal(got, want) and torch.equal(total, 2 * want), replay


@pytest.mark.parametrize("wire", ["exact", "fp8"])
@pytest.mark.parametrize("tp", [1, 2])
def test_routed_dispatch_in_a_graph(wire, tp):
    """The rows of each FFN instance and the sum of its answers, for two routings of one capture."""
    rows, top_k, bounds, hidden = 300, 3, (0, 3, 4, 9, 10), 1024
    layout, back = layouts(wire, "bfloat16", 512, hidden, top_k)
    order = [(5 * i + 1) % (4 * tp) for i in range(4 * tp)]
    here, there = views_of(back, order)
    x = torch.randn(rows, hidden, device=DEVICE).bfloat16()
    weights = torch.rand(rows, top_k, device=DEVICE)
    slots = torch.zeros((rows, top_k), dtype=torch.int32, device=DEVICE)
    splitter, answers = StreamSplitter(bounds, 1, DEVICE), PlacedAnswers(there, tp)

    def run():
        splitter.begin_step()
        split = splitter.split(0, encode(layout, 0, x, slots, weights))
        splitter.end_step()
        return split, answers.sum(split.places.of_rows, torch.bfloat16)

    run()
    torch.cuda.synchronize()
    graph, streams = torch.cuda.CUDAGraph(), make_streams(DEVICE)
    with streams.capturable(), torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        split, total = run()
    for most in (bounds[-1], 4):  # with 4, two instances get no row
        slots.copy_(torch.randint(-1, most, slots.shape))
        x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        on_cpu = StreamSplitter(bounds, 1, torch.device("cpu"))
        batch = encode(layout, 0, x, slots, weights)
        tensors = (batch.payload, batch.scales, batch.ids, batch.weights)
        copied = [None if tensor is None else tensor.cpu() for tensor in tensors]
        want = on_cpu.split(0, EncodedBatch(0, rows, *copied))
        counts = on_cpu._words[0].tolist()
        assert splitter._words[0].tolist() == counts and splitter.sent_in_step == counts
        for mine, theirs, count in zip(split.batches, want.batches, counts, strict=True):
            assert torch.equal(mine.ids.cpu(), theirs.ids)
            assert torch.equal(raw(mine.payload[:count]), raw(theirs.payload[:count]))
            assert torch.equal(mine.weights[:count].cpu(), theirs.weights[:count])
        assert torch.equal(split.places.of_rows.cpu(), want.places.of_rows)
        expected = PlacedAnswers(here, tp).sum(want.places.of_rows, torch.bfloat16)
        assert torch.equal(raw(total), raw(expected))
