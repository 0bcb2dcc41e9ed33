"""Stage times: hand-computed values, directions that must hold, and refusals."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd.wire.layout import layouts
from afd_planner.cost.budget import (
    rows_for_compute_bound,
    slot_seconds,
    sparsity_floor,
)
from afd_planner.cost.disaggregated import (
    afd_stages,
    collective_s,
    rest_seconds,
    tokens_per_gpu_second,
    usd_per_million_tokens,
    wire_seconds,
)
from afd_planner.cost.roofline import attention_parts, ffn_part
from afd_planner.cost.shape import (
    EVEN_ROUTING,
    IDEAL,
    AfdShape,
    Efficiency,
    Pool,
    Routing,
)
from afd_planner.cost.stages import (
    AfdStages,
    LayerStages,
    Part,
    StageTime,
    layer_period,
    step_seconds,
)
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.facts.precision import PRECISIONS, Precision, wire_bytes
from afd_planner.simulate.closed_form import step_seconds as closed_form

NAMES = ("step-3", "deepseek-v3", "qwen3-235b-a22b", "llama4-maverick", "minimax-m1")
MODELS = {name: load_model(name) for name in (*NAMES, "qwen3-32b")}
GPUS = {name: load_accelerator(name) for name in ("h800", "h20", "a800", "l20", "mi355x")}
STEP3, H800 = MODELS["step-3"], GPUS["h800"]
SPEEDS = ("memory_bandwidth", "scale_up_bandwidth", "nic_bandwidth")

pools = st.builds(
    Pool,
    st.sampled_from(sorted(GPUS)).map(GPUS.__getitem__),
    instances=st.integers(1, 4),
    gpus=st.sampled_from([1, 2, 4, 8]),
)
shapes = st.builds(
    AfdShape,
    attention=pools,
    ffn=pools,
    depth=st.integers(1, 3),
    rows=st.integers(1, 4096).map(float),
    context=st.integers(1, 131072).map(float),
    precision=st.sampled_from(sorted(PRECISIONS)).map(PRECISIONS.__getitem__),
    dense_on_ffn=st.booleans(),
    draft=st.integers(0, 2),
)
efficiencies = st.sampled_from([Efficiency(), IDEAL])
names = st.sampled_from(NAMES)


def step(name: str, shape: AfdShape, efficiency: Efficiency) -> float:
    return step_seconds(afd_stages(MODELS[name], shape, efficiency), shape.depth)


def not_more(faster: float, slower: float) -> bool:
    return faster <= slower * (1 + 1e-9)


# -- by hand -------------------------------------------------------------------------------------


def test_attention_of_step3_by_hand():
    group = STEP3.groups[1]
    projections, core = attention_parts(group, H800, 128, 4096, Precision(), 1, IDEAL)
    weights = 7168 * 2048 + 2048 * 16384 + 7168 * 512 + 16384 * 7168 + 7168 * 48
    assert projections.memory_s == pytest.approx(weights / 3.35e12)
    assert projections.compute_s == pytest.approx(2 * weights * 128 / 1.98e15)
    assert core.memory_s == pytest.approx(128 * 4096 * 512 / 3.35e12)
    assert core.compute_s == pytest.approx(128 * 4096 * 4 * 64 * 256 / 1.98e15)
    assert (projections.bound, core.bound) == ("memory", "memory")


def test_experts_of_step3_by_hand():
    moe = STEP3.groups[1].ffn
    part = ffn_part(moe, H800, 2048, Precision(), 16, 1, IDEAL)
    expert = 3 * 7168 * 5120
    assert part.compute_s == pytest.approx(2 * 2048 * (3 + 1) * expert / 16 / 1.98e15)
    pairs = 2048 * 3 / 16
    touched = 48 * (1 - (45 / 48) ** 2048) * 3 / 48 * expert + expert / 16
    assert part.memory_s == pytest.approx((touched + pairs * 7168 * 3) / 3.35e12)


def test_wire_of_step3_by_hand():
    shape = AfdShape(Pool(H800, 2, 8), Pool(H800, 2, 8), 3, 2048, 4096)
    to_ffn, back = wire_seconds(shape, 7168, 3, IDEAL)
    assert to_ffn == pytest.approx(128 * 2 * (7168 + 56 * 4 + 3 * 8) / 50e9)
    assert back == pytest.approx(128 * 2 * 7168 * 2 / 50e9)


def test_pools_in_one_server_use_its_links():
    small = AfdShape(Pool(H800, 1, 4), Pool(H800, 1, 4), 2, 256, 4096)
    mixed = replace(small, ffn=Pool(GPUS["h20"], 1, 4))
    assert small.one_server and not mixed.one_server
    ratio = wire_seconds(mixed, 7168, 3, IDEAL)[0] / wire_seconds(small, 7168, 3, IDEAL)[0]
    assert ratio == pytest.approx(200 / 50)


@pytest.mark.parametrize("wire", ["exact", "fp8"])
def test_wire_bytes_equal_the_protocols(wire):
    to_ffn, back = layouts(wire, "bfloat16", 64, 7168, 8)
    ours = wire_bytes(Precision(wire=wire), 7168, 8)
    assert ours == (to_ffn.message_bytes(64) / 64, back.message_bytes(64) / 64)


def test_mxfp4_wire_bytes_equal_the_published_round_trip():
    """AMD, SGLang with MoRI: 28,672 bytes in BF16, 11,200 with FP4 dispatch and FP8 combine."""
    assert sum(wire_bytes(Precision(wire="mxfp4"), 7168, 0)) == 11200
    assert sum(wire_bytes(Precision(wire="exact"), 7168, 0)) == 28672


def test_stage_slot_equals_the_reports():
    assert slot_seconds(0.050, 1, 0, 61, 3) == pytest.approx(273e-6, rel=0.001)
    assert slot_seconds(0.050, 1.5, 0.005, 60, 2) == pytest.approx(0.070 / 120)
    assert slot_seconds(0.010, 1, 0.020, 60, 2) < 0


def test_compute_bound_batch_and_sparsity_floor_are_one_condition():
    """At the sparsity floor, B_MoE rows use exactly the communication budget (section 5.4)."""
    budget, network = 16.6e-3, 400e9
    floor = sparsity_floor(1.98e15, 3.35e12, network, 7168, 61, budget)
    rows = rows_for_compute_bound(H800, "fp8", floor)
    assert rows * 3 * 7168 / network * 61 == pytest.approx(budget)
    assert rows_for_compute_bound(H800, "fp8", 1.0) == pytest.approx(591 / 2, rel=1e-3)
    assert rows_for_compute_bound(H800, "bfloat16", 1.0) == pytest.approx(295.2, rel=1e-3)


@given(rows=st.integers(1, 20000), gpu=st.sampled_from(sorted(GPUS)))
def test_b_moe_is_the_turning_point_of_the_roofline(rows, gpu):
    """Holds if every expert is used and activations cause no traffic."""
    moe, accelerator = MoeFfn(1 << 14, 1 << 14, 16, 4, 1 << 14), GPUS[gpu]
    flops = rows * moe.flops_per_token() / accelerator.math_flops("fp8")
    weights = moe.parameters / accelerator.memory_bandwidth
    threshold = rows_for_compute_bound(accelerator, "fp8", moe.sparsity)
    assert (flops >= weights) == (rows >= threshold) or math.isclose(rows, threshold)


def test_a_deployment_of_the_report():
    shape = AfdShape(Pool(H800, 2, 8), Pool(H800, 2, 8), 3, 2048, 4096, dense_on_ffn=True)
    seconds = step("step-3", shape, Efficiency())
    assert 0.045 < seconds < 0.050
    assert tokens_per_gpu_second(shape, seconds) == pytest.approx(6144 / seconds / 32)
    assert usd_per_million_tokens(1.48, 2378) == pytest.approx(0.173, abs=5e-4)


# -- pipeline ------------------------------------------------------------------------------------


def layer(attention: float, ffn: float, to_ffn: float = 0.0, back: float = 0.0) -> LayerStages:
    def stage(seconds: float) -> StageTime:
        return StageTime((Part("x", seconds, 0.0),), measured=True)

    return LayerStages((0, 1), stage(attention), stage(ffn), to_ffn, back)


times = st.floats(1e-6, 1e-2)


@given(a=times, f=times, c=times, depth=st.integers(1, 3))
def test_period_is_bound_by_the_busiest_or_by_one_round(a, f, c, depth):
    period = layer_period(layer(a, f, c, c), depth)
    assert period == pytest.approx(max(depth * max(a, f, c), a + f + 2 * c))
    assert layer_period(layer(a, f, c, c), depth + 1) >= period


@given(a=times, f=times, c=times)
def test_depth_three_condition_of_the_design(a, f, c):
    """The attention pool never waits if and only if it is busiest and 2 t_a >= t_f + t_c."""
    slack = a * 1e-9  # of rounding, the same on both sides
    busy = layer_period(layer(a, f, c, 0.0), 3) <= 3 * (a + slack)
    assert busy == (a + slack >= max(f, c) and 2 * a + 3 * slack >= f + c)


def test_step_adds_layers_and_rest():
    local = replace(layer(1e-3, 1e-3), layers=(2,), ffn=None)
    stages = AfdStages((layer(1e-3, 2e-3), local), 5e-3)
    # two layers of the slower stage, one local layer, the rest, and the fill: attention of the
    # first micro-batch
    assert step_seconds(stages, 2) == pytest.approx(2 * 4e-3 + 2e-3 + 5e-3 + 1e-3)


@given(
    st.integers(1, 40),
    st.integers(1, 3),
    *(st.floats(1e-5, 1e-3) for _ in range(4)),
    st.floats(0, 1e-4),
)
def test_a_step_of_equal_layers_takes_what_the_simulator_says(layers, depth, a, f, out, back, turn):
    """A turn costs at most its time at every position."""
    one = replace(layer(a, f, out, back), layers=tuple(range(layers)))
    wanted = closed_form(layers, depth, a, out, f, back)
    assert step_seconds(AfdStages((one,), 0.0), depth) == pytest.approx(wanted)
    slower = step_seconds(AfdStages((replace(one, turn_s=turn),), 0.0), depth)
    assert wanted * (1 - 1e-9) <= slower <= wanted + layers * depth * turn + 1e-12


def test_bound_names_the_largest_share():
    parts = (Part("a", 1.0, 2.0), Part("b", 1.5, 1.0))
    assert StageTime(parts).bound == "memory"
    assert StageTime(parts).seconds == 3.5
    assert StageTime(parts, link_s=3.0).bound == "link"
    assert StageTime(parts, overhead_s=3.0).bound == "overhead"
    assert StageTime((Part("b", 1.5, 1.0),)).bound == "compute"


# -- directions ----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    name=names,
    shape=shapes,
    efficiency=efficiencies,
    which=st.sampled_from((*SPEEDS, "flops")),
    pool=st.sampled_from(["attention", "ffn"]),
    factor=st.floats(1, 8),
)
def test_faster_hardware_never_costs_time(name, shape, efficiency, which, pool, factor):
    if shape.one_server and pool == "ffn" and which == "scale_up_bandwidth":
        which = "nic_bandwidth"  # both pools share one server and its links
    old: Pool = getattr(shape, pool)
    if which == "flops":
        change = {"flops": {k: v * factor for k, v in old.accelerator.flops.items()}}
    else:
        change = {which: getattr(old.accelerator, which) * factor}
    faster = replace(shape, **{pool: replace(old, accelerator=replace(old.accelerator, **change))})
    assert not_more(step(name, faster, efficiency), step(name, shape, efficiency))


@settings(max_examples=25)
@given(name=names, shape=shapes, efficiency=efficiencies, more=st.floats(1, 16))
def test_longer_context_never_costs_less(name, shape, efficiency, more):
    longer = replace(shape, context=shape.context * more)
    assert not_more(step(name, shape, efficiency), step(name, longer, efficiency))


@settings(max_examples=25)
@given(name=names, shape=shapes, efficiency=efficiencies, more=st.floats(1, 8))
def test_more_rows_never_take_less_time(name, shape, efficiency, more):
    larger = replace(shape, rows=shape.rows * more)
    assert not_more(step(name, shape, efficiency), step(name, larger, efficiency))


@settings(max_examples=25)
@given(name=names, shape=shapes, efficiency=efficiencies)
def test_more_attention_instances_never_slow_attention(name, shape, efficiency):
    wider = replace(shape, attention=replace(shape.attention, instances=8))
    old, new = (afd_stages(MODELS[name], s, efficiency).groups for s in (shape, wider))
    for before, after in zip(old, new, strict=True):
        assert not_more(after.attention.seconds, before.attention.seconds)


@settings(max_examples=25)
@given(name=names, shape=shapes, efficiency=efficiencies)
def test_speculation_reads_the_cache_once(name, shape, efficiency):
    plain, drafting = (
        afd_stages(MODELS[name], replace(shape, draft=d), efficiency) for d in (0, 1)
    )
    for before, after in zip(plain.groups, drafting.groups, strict=True):
        assert after.attention.parts[1].memory_s == before.attention.parts[1].memory_s
        assert not_more(before.attention.seconds, after.attention.seconds)
        assert before.to_ffn <= after.to_ffn


@given(rows=st.integers(1, 4096), tp=st.sampled_from([1, 2, 4, 8]), data=st.data())
def test_more_expert_shards_never_slow_the_ffn(rows, tp, data):
    moe = MODELS[data.draw(names)].groups[-1].ffn
    shards = data.draw(st.integers(1, moe.experts - 1))
    few, many = (
        ffn_part(moe, H800, rows, Precision(), n, tp, IDEAL).seconds for n in (shards, shards + 1)
    )
    assert not_more(many, few)


@given(rows=st.integers(1, 4096), imbalance=st.floats(1, 4))
def test_imbalance_never_helps(rows, imbalance):
    moe = STEP3.groups[1].ffn
    even = ffn_part(moe, H800, rows, Precision(), 8, 1, IDEAL, EVEN_ROUTING).seconds
    assert not_more(
        even, ffn_part(moe, H800, rows, Precision(), 8, 1, IDEAL, Routing(imbalance)).seconds
    )


def test_few_heads_waste_a_tile():
    """GQA with 16 query heads per KV head fills a quarter of a 64-row tile (H20 in Table 9)."""
    group, h20 = MODELS["qwen3-235b-a22b"].groups[0], GPUS["h20"]
    tiled = replace(IDEAL, query_tile=64)
    plain, padded = (
        attention_parts(group, h20, 256, 8192, Precision(), 4, e)[1].compute_s
        for e in (IDEAL, tiled)
    )
    assert padded == pytest.approx(4 * plain)
    mfa = STEP3.groups[0]
    plain, padded = (
        attention_parts(mfa, h20, 64, 8192, Precision(), 1, e)[1].compute_s for e in (IDEAL, tiled)
    )
    assert padded == plain


def test_collectives():
    assert collective_s(1e9, 1, H800, Efficiency()) == 0
    inside = collective_s(8e9, 8, H800, IDEAL)
    assert inside == pytest.approx(7e9 / 200e9)
    assert collective_s(16e9, 16, H800, IDEAL) == pytest.approx(15e9 / 50e9)


def test_rest_of_a_step():
    seconds = rest_seconds(STEP3, H800, 1, Precision(), 1, IDEAL)
    assert seconds == pytest.approx(128815 * 7168 * 2 / 3.35e12, rel=0.01)
    assert rest_seconds(STEP3, H800, 512, Precision(), 1, IDEAL) > seconds
    assert rest_seconds(STEP3, H800, 512, Precision(), 8, IDEAL) < seconds


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Pool(H800, 1, 8, 3), "TP 3; use a TP that divides"),
        (lambda: Pool(H800, 0, 8), "a pool of 0 instances"),
        (lambda: Efficiency(memory=0), r"efficiency memory is 0; give \(0, 1\]"),
        (lambda: Efficiency(hidden_exchange=1.5), r"hidden_exchange is 1.5; give \[0, 1\]"),
        (lambda: Efficiency(query_tile=0), "query_tile is 0"),
        (lambda: Routing(imbalance=0.5), "expert imbalance is 0.5"),
        (lambda: Precision(kv="int3"), "number format 'int3' is unknown; use one of float32"),
        (lambda: Precision(wire="zip"), "wire format 'zip' is unknown; use one of exact, fp8"),
        (lambda: wire_bytes(Precision(wire="mxfp4"), 100, 2), "divisible by 128, not 100"),
        (
            lambda: ffn_part(STEP3.groups[1].ffn, H800, 8, Precision(), 49, 1, IDEAL),
            "49 expert-parallel groups cannot share 48 experts",
        ),
    ],
)
def test_refusals(make, words):
    with pytest.raises(ConfigError, match=words):
        make()
