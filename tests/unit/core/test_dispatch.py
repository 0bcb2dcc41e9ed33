"""The FFN instances that get a row; routed dispatch gives the same bits as broadcast."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_support import Deployed, deploying, random_rows

from afd.control.messages import Members, Move
from afd.errors import ConfigError
from afd.metrics.role import Direction
from afd.models import read_model
from afd.placement.dispatch import cheaper_dispatch, instances_per_row, row_bytes, rows_of_instances
from afd.placement.tables import copies, slot_bounds
from afd.wire.layout import Kind, layouts
from afd.wire.message import message
from afd_comm import Group, Link, Region, Status, make_flag
from afd_launch.balance import balance
from attention_worker.remote.dispatch import Splitter
from attention_worker.remote.encoded_batch import encode
from attention_worker.remote.expert_slots import ExpertSlotMap
from ffn_worker.experts.build import load_ffn_model
from ffn_worker.experts.shard import DTYPES
from ffn_worker.moe.vllm_cpu import VllmCpuBackend


@settings(max_examples=30)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_instances_per_row_equals_counting(held, data):
    top_k = data.draw(st.integers(1, min(4, sum(held))))
    owner = [j for j, n in enumerate(held) for _ in range(n)]
    chosen = list(itertools.combinations(range(len(owner)), top_k))
    counted = sum(len({owner[e] for e in row}) for row in chosen) / len(chosen)
    assert instances_per_row(held, top_k) == pytest.approx(counted)
    assert row_bytes("broadcast", held, top_k, 10) == 10 * len(held)


@pytest.mark.parametrize(
    "held,top_k,chosen",
    [
        ([64, 64], 8, "broadcast"),  # a row needs 1.99 of 2 instances
        ([16] * 8, 8, "routed"),  # 5.3 of 8
        ([32] * 4, 4, "routed"),  # 2.7 of 4
        ([32] * 4, 8, "broadcast"),  # 3.6 of 4
        ([64, 64], 1, "routed"),  # 1 of 2
        ([8], 2, "broadcast"),
    ],
)
def test_auto_chooses_routed_if_it_sends_clearly_fewer_bytes(held, top_k, chosen):
    assert cheaper_dispatch(held, top_k, 100.0) == chosen


def test_routed_bytes_to_24_instances():
    """docs/placement.md: 29 % of broadcast's bytes for 8 of 256 experts, as DeepSeek-V3 has.
    Counted from the messages that arrive, and by the formula."""
    instances, top_k, rows = 24, 8, 200
    bounds = slot_bounds(256, instances, 0)
    held = [high - low for low, high in itertools.pairwise(bounds)]
    layout, _ = layouts("exact", "bfloat16", rows, 128, top_k)
    regions = [Region(1, layout.nbytes, name=f"ffn-{j}") for j in range(instances)]
    links = [Link(r.addresses, slots=(0, 1), timeout_us=10**6, backend="shm") for r in regions]
    ids = torch.rand(rows, 256, generator=torch.Generator().manual_seed(0)).topk(top_k).indices
    hidden, weights = torch.zeros(rows, 128).bfloat16(), torch.zeros(rows, top_k)
    batch = encode(layout, 0, hidden, ids.int(), weights)
    plan = Splitter(bounds, 1, torch.device("cpu")).split(batch.ids)
    batch = batch.by_rank(plan)
    parts = batch.row_parts(layout)
    request = message(0, parts, rows, layer=0, micro_batch=0, depth=1, kind=Kind.DATA)
    group, flags = Group(links, timeout_us=10**6), [make_flag(1, 1)] * instances
    assert set(group.scatter(request, flags, list(plan.counts))) == {Status.OK}
    arrived = sum(region.header(0).nbytes for region in regions)
    share = arrived / (instances * layout.message_bytes(rows))
    formula = row_bytes("routed", held, top_k, 1.0) / row_bytes("broadcast", held, top_k, 1.0)
    assert formula == pytest.approx(0.292, abs=0.0005)
    assert share == pytest.approx(formula, abs=0.005)
    # A replayed step sends the ids of all rows: at hidden 7168, 0.08 % of broadcast's bytes.
    replayed = formula + (1 - formula) * 4 * top_k / 28736
    assert replayed == pytest.approx(0.293, abs=0.0005)
    for link in links:
        link.close()


@settings(max_examples=30)
@given(st.data())
def test_splitter_equals_its_reference(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=5))
    bounds = tuple(itertools.accumulate(sizes, initial=0))
    rows, top_k = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 4))
    slot = st.integers(-1, bounds[-1] - 1)  # -1 is a masked row
    slots = [[data.draw(slot) for _ in range(top_k)] for _ in range(rows)]
    expected = rows_of_instances(slots, bounds)
    for bank in (0, 1):
        ids = torch.tensor(slots, dtype=torch.int32).view(rows, top_k)
        ids = torch.where(ids < 0, ids, ids + bank * bounds[-1])
        shares = Splitter(bounds, 1, torch.device("cpu")).split(ids)
        found = shares.rows.split(shares.counts)
        assert tuple(tuple(part.tolist()) for part in found) == expected


def sections(dispatch, wire="exact", **ffn):
    return {
        "wire": {"dispatch": dispatch, "format": wire},
        "ffn": {"shared_experts": "rows", **ffn},
    }


@pytest.fixture
def deploy(tiny_models):
    with deploying() as start:

        def make(family, x, y, backend="torch", **sections):
            return start(tiny_models(family), x, y, backend, **sections)

        yield make


def answers(deployed, batches):
    """Returns the deployment's answers to these micro-batches in every layer."""
    client, found = deployed.clients[0], []
    client.begin_step(len(batches))
    for layer in deployed.resolved.model.moe_layers:
        for mb, batch in enumerate(batches):
            client.send(layer, mb, *batch)
        found += [client.recv(mb).clone() for mb in range(len(batches))]
    client.end_step()
    return found


@pytest.mark.parametrize(
    "wire,backend,tp",
    [
        ("exact", "torch", 1),
        ("fp8", "torch", 1),
        ("mxfp4", "torch", 1),
        ("exact", "reference", 1),
        ("exact", "torch", 2),
    ],
)
def test_routed_gives_the_bits_of_broadcast(deploy, wire, backend, tp):
    options = {"redundant_experts": 1, "tp": tp}
    both = [
        deploy("deepseek_v3", 1, 3, backend, **sections(dispatch, wire, **options))
        for dispatch in ("broadcast", "routed")
    ]
    batches = [random_rows(both[0].resolved, rows, rows) for rows in (17, 1, 6)]
    batches[2][1][:] = batches[2][1][:1]  # equal rows, so some instance gets none
    found = [answers(deployed, batches) for deployed in both]
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    sent = [d.clients[0]._observer.metrics.wire_bytes[Direction.A2F] for d in both]
    layers = len(both[0].resolved.model.moe_layers)
    assert sent[0] == tp * 3 * layers * both[0].resolved.a2f.message_bytes(17 + 1 + 6)
    assert sent[1] < 0.9 * sent[0]
    returned = [
        sum(loop.rank.metrics.wire_bytes[Direction.F2A] for loop in d.loops.values()) for d in both
    ]
    assert returned[1] < 0.9 * returned[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["torch", "vllm_cpu"])
def test_rounding_of_a_row_does_not_depend_on_other_rows(tiny_models, backend, dtype):
    """Routed dispatch relies on this. Calls run one at a time, because vLLM's kernels share scratch
    memory within a process."""
    path = tiny_models("deepseek_v3")
    family, model = read_model(path)
    model = family.serve_as(model, dtype)
    if backend == "vllm_cpu":  # on processors with AMX, it computes bfloat16 only
        sizes = model.hidden, model.moe_intermediate
        if (reason := VllmCpuBackend.unavailable(DTYPES[dtype], *sizes)) is not None:
            pytest.skip(f"vllm_cpu: {reason}")
    x = torch.randn(40, model.hidden, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    scores = torch.rand(40, model.num_experts, generator=torch.Generator().manual_seed(2))
    weights, ids = scores.topk(model.top_k, dim=-1)
    for index in range(2):
        part = load_ffn_model(
            path, family, model, instances=2, index=index, shared_by_rows=True, backend=backend
        )
        rows = Splitter(
            (0, part.shard.total_slots // 2, part.shard.total_slots), 1, torch.device("cpu")
        ).split(ids.int())
        mine = rows.rows.split(rows.counts)[index]
        assert 0 < len(mine) < len(x)
        for layer in model.moe_layers:
            everything = part.forward(layer, x, ids.int(), weights)
            ours = part.forward(layer, x[mine], ids[mine].int(), weights[mine])
            assert torch.equal(everything[mine], ours)


def test_an_instance_without_rows_also_answers(deploy, tiny_models):
    deployed = deploy("qwen3_moe", 2, 3, **sections("routed"))
    x, ids, weights = random_rows(deployed.resolved, 4, 1)
    ids[:] = torch.tensor([0, 1])  # both experts are on the first of three instances
    for _ in range(3):
        assert all(part.abs().sum() > 0 for part in answers(deployed, [(x, ids, weights)]))
    loops = [deployed.loops[number] for number in range(3)]  # sorted by number
    calls = [loop.rank.metrics.rows_per_ffn_call.snapshot().count for loop in loops]
    assert calls[0] == 3 * len(deployed.resolved.model.moe_layers)
    assert calls[1:] == [0, 0]


@pytest.mark.parametrize("dispatch", ["broadcast", "routed"])
def test_rows_without_experts_are_answered_with_zeros(deploy, dispatch):
    """vLLM's warm-up sends such steps: all rows are masked."""
    deployed = deploy("qwen3_moe", 1, 2, **sections(dispatch))
    x, ids, weights = random_rows(deployed.resolved, 4, 1)
    for part in answers(deployed, [(x, torch.full_like(ids, -1), weights)] * 2):
        assert part.shape == x.shape and not part.any()


def test_copies_share_the_rows_and_every_pair_is_computed_once(deploy):
    resolved = deploy("qwen3_moe", 1, 3, **sections("routed", redundant_experts=2)).resolved
    model, placement = resolved.model, resolved.placement
    layer, table = model.moe_layers[0], placement.tables[0]
    _, ids, _ = random_rows(resolved, 40, 3)
    seen = set()
    for index in (0, 1):
        slots = ExpertSlotMap(resolved, index).of(layer, ids)
        assert slots.dtype == torch.int32
        assert torch.equal(torch.tensor(table, dtype=torch.int32)[slots], ids)
        seen |= set(slots.flatten().tolist())
    assert seen == set(range(placement.slots))  # every copy gets rows

    moved = balance([float(e) for e in range(model.num_experts)], placement.bounds)
    found = ExpertSlotMap(resolved, 0)
    found.adopt(Members(moved=(Move(layer, 1, moved),), moves=1))
    slots = found.of(layer, ids) - placement.slots
    assert torch.equal(torch.tensor(moved, dtype=torch.int32)[slots], ids)
    assert {len(s) for s in copies(moved, model.num_experts)} != {1}


def test_settings_under_captured_graphs(tiny_models):
    """Routed dispatch, shared experts by rows and expert moves work under graphs. But copies
    between GPUs are as long as the buffer, so `auto` sees nothing to gain there."""
    from afd.config.resolve import resolve

    many = {"device": "cuda", "instances": 8}
    gpu = {"attention": {"device": "cuda"}, "ffn": many}

    def resolved(**more):
        return resolve(Deployed.parsed(tiny_models("qwen3_moe"), {**gpu, **more}))

    assert resolved().dispatch == "broadcast"
    assert resolved(transport={"backend": "ipc"}).dispatch == "broadcast"
    assert resolved(transport={"backend": "tcp"}).dispatch == "routed"
    assert resolved(pipeline={"graphs": False}).dispatch == "routed"
    routed = resolved(wire={"dispatch": "routed"})
    assert (routed.dispatch, routed.shared_by_rows) == ("routed", True)
    assert resolved(ffn={**many, "shared_experts": "rows"}).shared_by_rows
    slices = {"instances": 2, "shared_experts": "slices"}
    with pytest.raises(ConfigError, match="needs every row"):
        resolve(
            Deployed.parsed(
                tiny_models("qwen3_moe"), {"ffn": slices, "wire": {"dispatch": "routed"}}
            )
        )
