"""The search: arrays equal the cost model; more bandwidth, memory or time never lowers rates."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from planner_support import is_quick, request, scaled

from afd.errors import ConfigError
from afd_planner.cost.colocated import colocated_step
from afd_planner.cost.measured import parse_measured
from afd_planner.cost.shape import AfdShape, ColocatedShape, Efficiency, Pool
from afd_planner.cost.stages import AfdStages, LayerStages, Part, StageTime, step_seconds
from afd_planner.facts.precision import PRECISIONS
from afd_planner.sizing.afd_units import Relief, afd_units
from afd_planner.sizing.colocated_units import colocated_units
from afd_planner.sizing.context import ContextMix, parse_context
from afd_planner.sizing.decide import make_plan
from afd_planner.sizing.imbalance import EVEN_SPREAD, ExpertSpread, load_spread
from afd_planner.sizing.plan import Constraint
from afd_planner.sizing.search import Limits, Search, afd_operating, colocated_operating
from afd_planner.sizing.unit_cost import afd_point, binding_afd, routing_for

ALL_FP8 = PRECISIONS["all-fp8"]
MODELS = ("step-3", "deepseek-v3", "qwen3-30b-a3b", "qwen3-32b", "minimax-m1")
few = settings(
    max_examples=10,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)


# -- the arrays against the cost model


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("accelerator", "ffn"), [("h800", None), ("h20", "mi355x")])
def test_units_cost_what_the_cost_model_says(model, accelerator, ffn):
    drafts = {"positions": 3, "accepted": 1.5} if ffn else {}
    asked = request(model, accelerator, ffn, context=5000, **drafts)
    random = np.random.default_rng(7)
    found = afd_units(asked, {})
    assert found
    for units in found:
        rows = np.floor(np.exp(random.uniform(0, math.log(600), units.x.shape)))
        seconds = units.step(rows)
        for i in random.integers(0, len(rows), 4):
            which = int(units.which[i])
            attention = Pool(
                units.attention.accelerator,
                int(units.x[i]),
                units.attention.gpus,
                units.attention.tp,
            )
            pool = Pool(
                units.ffn.accelerator,
                int(units.y[i]),
                units.ffn.gpus,
                int(units.ffn.tp[which]),
            )
            depth, whole = int(units.depth[i]), float(rows[i] * attention.groups)
            copies = int(units.redundant[i])
            _, stages, _ = afd_point(asked, attention, pool, depth, whole, units.wire, copies)
            assert seconds[i] == pytest.approx(step_seconds(stages, depth), rel=1e-9)


@pytest.mark.parametrize("experts", [False, True])
def test_units_with_measured_stages_cost_what_the_cost_model_says(experts):
    held = [{"experts": 2.0}, {"experts": 128.0}] if experts else [{}]
    sizes = (1, 100, 10_000)
    table = parse_measured(
        {
            "format": "afd-stage-times-1",
            "attention": [
                {"rows": n, "context": c, "us": 20 + n + c / 1e3}
                for n in sizes
                for c in (1000, 9000)
            ],
            "ffn": [{"rows": n, "us": 30 + n / 9, **which} for n in sizes for which in held],
            "wire": [{"bytes": 1000 * n, "us": 5 + n} for n in sizes],
            "rest": [{"rows": n, "us": 500 + n} for n in sizes],
        },
        "a test",
    )
    asked = request("qwen3-30b-a3b", context=4000, measured=table, positions=2, accepted=1.5)
    for units in afd_units(asked, {}):
        rows = np.full(units.x.shape, 37.0)
        seconds = units.step(rows)
        for i in range(0, len(rows), 400):
            attention, ffn = (
                Pool(units.attention.accelerator, int(n), gpus, tp)
                for n, gpus, tp in (
                    (units.x[i], units.attention.gpus, units.attention.tp),
                    (units.y[i], units.ffn.gpus, int(units.ffn.tp[units.which[i]])),
                )
            )
            depth, whole = int(units.depth[i]), 37.0 * attention.groups
            copies = int(units.redundant[i])
            _, stages, names = afd_point(asked, attention, ffn, depth, whole, units.wire, copies)
            assert names == ("attention", "ffn", "wire", "rest")
            assert seconds[i] == pytest.approx(step_seconds(stages, depth), rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_colocated_units_cost_what_the_cost_model_says(model):
    asked = request(model, "h800", context=5000, positions=2, accepted=1.5)
    random = np.random.default_rng(8)
    (units,) = colocated_units(asked)
    rows = np.floor(np.exp(random.uniform(0, math.log(600), units.gpus.shape)))
    seconds = units.step(rows)
    for i in random.integers(0, len(rows), 12):
        micro_batches = int(units.micro_batches[i])
        whole = float(rows[i] * units.groups[i])
        shape = ColocatedShape(
            units.accelerator,
            int(units.gpus[i]),
            int(units.tp[i]),
            int(units.ep[i]),
            whole * micro_batches,
            5000,
            replace(asked.precision, wire="fp8"),
            routing_for(asked, whole * 2, int(units.ep[i]), int(units.redundant[i])),
            overlap=micro_batches == 2,
            draft=1,
        )
        step = colocated_step(asked.model, shape, asked.efficiency)
        assert seconds[i] == pytest.approx(step.seconds, rel=1e-9)


def test_a_mix_of_contexts_costs_its_mean_for_full_attention():
    mixed = ContextMix((1000.0, 9000.0), (0.5, 0.5))
    one = Search(request(context=5000)).best_afd(Limits(0.05, 64))
    two = Search(replace(request(), context=mixed)).best_afd(Limits(0.05, 64))
    assert two.tokens_per_s == pytest.approx(one.tokens_per_s, rel=1e-6)


def test_draft_tokens_read_the_cache_once():
    plain = request("qwen3-235b-a22b", "h20", context=16384)
    drafting = replace(plain, positions=2, accepted=1.8)
    searches = [Search(asked) for asked in (plain, drafting)]
    rates = [search.best_afd(search.limits).score for search in searches]
    assert rates[0] < rates[1] < 1.8 * rates[0]
    point, stages = afd_operating(searches[1].best_afd(searches[1].limits))
    assert step_seconds(stages, point.shape.depth) == pytest.approx(point.step_s, rel=1e-9)


# -- limits of a plan


@pytest.mark.parametrize("model", MODELS[:4])
def test_a_plan_keeps_tpot_budget_and_memory(model):
    asked = request(model, gpus=48)
    search = Search(asked)
    point, stages = afd_operating(search.best_afd(search.limits))
    assert point.tpot_s <= asked.tpot_s * (1 + 1e-9)
    assert step_seconds(stages, point.shape.depth) == pytest.approx(point.step_s, rel=1e-9)
    assert point.gpus <= 48
    own = point.copies * point.shape.batch / point.step_s
    others = sum(other.tokens_per_s for other in point.others)
    assert point.tokens_per_s == pytest.approx(own + others)
    assert all(other.tpot_s <= asked.tpot_s * (1 + 1e-9) for other in point.others)
    other = colocated_operating(search.best_colocated(search.limits))
    assert other.tpot_s <= asked.tpot_s * (1 + 1e-9) and other.gpus <= 48


@pytest.mark.parametrize(
    ("attention", "ffn", "wire", "depth", "expected"),
    [
        ((1, 9), (5, 1), 1, 3, Constraint.ATTENTION_BANDWIDTH),
        ((9, 1), (5, 1), 1, 3, Constraint.ATTENTION_COMPUTE),
        ((1, 5), (1, 9), 1, 3, Constraint.FFN_WEIGHT_READS),
        ((1, 5), (9, 1), 1, 3, Constraint.FFN_COMPUTE),
        ((1, 3), (3, 1), 9, 3, Constraint.NETWORK),
        ((1, 5), (5, 1), 1, 1, Constraint.SLO_SLOT),
    ],
)
def test_the_busiest_stage_binds(attention, ffn, wire, depth, expected):
    def stage(name, seconds):
        return StageTime((Part(name, *map(float, seconds)),))

    layers = LayerStages((0, 1), stage("attention", attention), stage("ffn", ffn), wire, wire)
    assert binding_afd(AfdStages((layers,), 0.0), depth) is expected


def test_a_slow_scheduler_binds():
    """It does 1 ms per request, so 50 of them in 50 ms, per data-parallel group of either side."""
    asked = request("qwen3-235b-a22b", "h800")
    slow = replace(asked, efficiency=replace(asked.efficiency, host_s=0.0, host_row_s=1e-3))
    search = Search(slow)
    ours, _ = afd_operating(search.best_afd(search.limits))
    theirs = colocated_operating(search.best_colocated(search.limits))
    for point, groups in ((ours, ours.shape.attention.groups), (theirs, theirs.shape.dp)):
        rows = point.shape.batch if point is ours else point.shape.rows
        assert point.binding is Constraint.HOST
        assert point.step_s == pytest.approx(1e-3 * rows / groups)
        assert 0.03 < point.step_s <= 0.05


def test_a_full_cache_binds():
    search = Search(request("qwen3-235b-a22b", "h800", context=32768))
    assert afd_operating(search.best_afd(search.limits))[0].binding is Constraint.KV_CAPACITY


def test_weights_that_fill_the_memory_bind():
    search = Search(request("deepseek-v3", "h800", gpus=16, context=32768))
    point = colocated_operating(search.best_colocated(search.limits))
    assert point.binding is Constraint.MEMORY_FIT


def test_the_paper_deployment_is_among_the_best():
    """Step-3 at 4K: the report's 2A2F reaches 4,039 tokens/s/GPU (Table 8)."""
    search = Search(request("step-3", "h800", gpus=32))
    point, _ = afd_operating(search.best_afd(search.limits))
    assert 3000 < point.per_gpu < 5500


# -- monotonicity


@st.composite
def asks(draw):
    model = draw(st.sampled_from(("step-3", "qwen3-30b-a3b", "deepseek-v3")))
    gpus = draw(st.sampled_from((16, 64, 256)))
    context = draw(st.sampled_from((2048, 6000, 16384)))
    accelerator = draw(st.sampled_from(("h800", "h20", "mi300x")))
    return request(model, accelerator, context=context, gpus=gpus)


def _rates(asked):
    search = Search(asked)
    found = search.best_afd(search.limits), search.best_colocated(search.limits)
    return [best.score if best else 0.0 for best in found]


@few
@given(
    asks(),
    st.sampled_from(("memory_bandwidth", "nic_bandwidth", "scale_up_bandwidth", "memory_bytes")),
    st.floats(1.05, 4),
)
@example(request("deepseek-v3", "h20", context=6000, gpus=64), "scale_up_bandwidth", 1.5)
def test_more_bandwidth_or_memory_never_costs_tokens(asked, field, factor):
    """A plan of xAyF units fills its GPUs with colocated ones only while an xAyF unit beats them,
    so it may lose by what lets colocated overtake it. The better of both never loses."""
    ours, theirs = _rates(asked)
    ours_after, theirs_after = _rates(scaled(asked, field, factor))
    least = 1 - 1e-6
    assert theirs_after >= theirs * least
    assert max(ours_after, theirs_after) >= max(ours, theirs) * least
    assert ours_after >= ours * least or ours_after < theirs_after


@few
@given(asks(), st.floats(0.015, 0.2), st.floats(1.01, 4))
def test_a_longer_tpot_never_lowers_throughput(asked, tpot, factor):
    search = Search(asked)
    for best in (search.best_afd, search.best_colocated):
        tight, loose = best(Limits(tpot, asked.gpus)), best(Limits(tpot * factor, asked.gpus))
        assert tight is None or loose.score >= tight.score * (1 - 1e-6)


@few
@given(asks(), st.sampled_from((1, 2, 4)), st.floats(1.1, 8))
def test_longer_contexts_never_lower_x(asked, y, factor):
    """With a fixed FFN pool and depth 3, the best number of attention instances never falls, up to
    what rounding to whole rows changes: the rate hardly depends on it.

    That is without the host, which limits the rows of an instance at short contexts.
    """
    unlimited = replace(asked.efficiency, host_s=0.0, host_row_s=0.0)
    asked = replace(asked, gpus=None, depths=(3,), wires=("fp8",), spread=EVEN_SPREAD)
    asked = replace(asked, efficiency=unlimited)
    found = []
    for space in _two_contexts(asked, factor):
        units = space.afd[0]
        same = units.picked((units.y == y) & (units.ffn.tp[units.which] == 1))
        rows = same.rows(asked.tpot_s)
        found.append((same.x, rows, same.tokens_per_s(rows) / same.price))
    (x, rows, rate), (longer_x, longer_rows, longer_rate) = found
    if not longer_rows.any():
        return
    assert rows.any()
    best = np.argmax(longer_rate)
    as_many = longer_rate[longer_x >= x[np.argmax(rate)]].max()
    assert as_many >= longer_rate[best] * (1 - 1 / longer_rows[best])


@few
@given(asks(), st.integers(1, 3), st.floats(1.1, 8), st.integers(64, 4096))
def test_longer_contexts_never_need_fewer_attention_instances(asked, depth, factor, whole):
    """Compares the fewest attention instances that carry the same rows, at a fixed depth."""
    asked = replace(asked, depths=(depth,), wires=("fp8",))
    needed = []
    for space in _two_contexts(asked, factor):
        units = space.afd[0]
        same = units.picked(units.which == 0)
        carried = same.rows(asked.tpot_s) * same.groups
        needed.append(
            min((x for x, n in zip(same.x, carried, strict=True) if n >= whole), default=math.inf)
        )
    assert needed[0] <= needed[1]


def test_the_best_plan_may_lower_depth_and_x_for_longer_contexts():
    """Shows why the two tests above fix the depth. A longer context may leave too few rows for
    three micro-batches. Each of two micro-batches has more rows, so that fewer attention instances
    keep the same FFN pool busy."""
    found = []
    for context in (8192, 16384):
        asked = request("qwen3-235b-a22b", "h800", context=context, precision=ALL_FP8)
        search = Search(asked)
        shape = afd_operating(search.best_afd(search.limits))[0].shape
        found.append((shape.attention.instances, shape.ffn.instances, shape.depth))
    assert found == [(12, 2, 3), (6, 1, 2)]


def _two_contexts(asked, factor):
    """Returns searches for the request's context and for a longer one within the model's limit."""
    search = Search(asked)
    factor = min(factor, asked.model.max_context / asked.context.longest)
    return search, search.at_context(asked.context.scaled(factor))


def test_relief_never_hurts():
    search = Search(request("deepseek-v3", gpus=64))
    plain = search.best_afd(search.limits).score
    for name in ("rereads", "network", "kv", "imbalance", "overheads"):
        assert search.best_afd(search.limits, Relief(**{name: True})).score >= plain * (1 - 1e-9)


# -- errors and requests


def test_an_impossible_tpot_names_the_smallest_feasible_one():
    with pytest.raises(ConfigError, match=r"smallest feasible one is ([\d.]+) ms") as caught:
        make_plan(request(tpot_s=0.002))
    smallest = float(str(caught.value).rsplit("--tpot ", 1)[1])
    assert make_plan(request(tpot_s=smallest / 1e3)).chosen.tokens_per_s > 0


def test_too_few_gpus_names_how_many_fit():
    with pytest.raises(ConfigError, match=r"does not fit 2 H800 GPUs.*at least") as caught:
        make_plan(request("deepseek-v3", gpus=2))
    fit = int(str(caught.value).rsplit("--gpus ", 1)[1])
    assert make_plan(request("deepseek-v3", gpus=fit, tpot_s=0.5)).chosen.gpus <= fit


def test_a_model_that_never_fits_is_one_sentence():
    asked = request("kimi-k2", "l4")
    tiny = scaled(asked, "memory_bytes", 0.05)
    with pytest.raises(ConfigError, match="does not fit 256 L4 GPUs"):
        make_plan(tiny)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tpot_s": 0}, "is out of range; give 1 to 60000 ms"),
        ({"gpus": 0}, "too small; give at least 1"),
        ({"gpus": 8, "tokens_per_s": 100.0}, "not both"),
        ({"tokens_per_s": -1.0}, "is invalid; give a number above 0"),
        ({"tokens_per_s": math.inf}, "is invalid; give a number above 0"),
        ({"tokens_per_s": math.nan}, "is invalid; give a number above 0"),
        ({"accepted": math.nan}, "between 1 and the 1 computed"),
        ({"tpot_s": math.nan}, "is out of range"),
        ({"batch": 64}, "--batch needs a --layout"),
        ({"accepted": 2.0}, "between 1 and the 1 computed"),
        ({"context": 100_000}, "reads at most 65536 tokens"),
    ],
)
def test_invalid_requests_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        request(**changes)


def test_a_target_rate_sets_the_copies():
    plan = make_plan(request(tokens_per_s=500_000.0))
    assert plan.chosen.tokens_per_s >= 500_000
    one_less = plan.chosen.tokens_per_s * (plan.chosen.copies - 1) / plan.chosen.copies
    assert one_less < 500_000


def test_a_plan_is_quick():
    make_plan(request("qwen3-30b-a3b"))
    assert is_quick(lambda: make_plan(request("deepseek-v3", gpus=320)))


# -- contexts and expert loads


@pytest.mark.parametrize(
    ("text", "mean", "longest"),
    [
        ("4096", 4096, 4096),
        ("32k", 32768, 32768),
        ("1000:0.75,5000:0.25", 2000, 5000),
    ],
)
def test_contexts(text, mean, longest):
    mix = parse_context(text)
    assert (mix.mean, mix.longest) == (pytest.approx(mean), longest)
    assert sum(mix.shares) == pytest.approx(1)


def test_a_mix_has_the_given_quantiles():
    mix = parse_context("p50=4096,p90=16384,p99=65536")
    shares = np.cumsum(mix.shares)
    at = [mix.lengths[int(np.searchsorted(shares, q - 1e-9))] for q in (0.475, 0.875)]
    assert at[0] <= 4096 <= mix.lengths[10] and at[1] <= 16384 < mix.longest <= 65536
    assert mix.average(lambda length: min(length, 100)) == pytest.approx(100)


@pytest.mark.parametrize(
    "text",
    ["", "long", "10:0.5", "10:0.5,20:0.6", "p90=10", "p50=10,p90=5", "p50=1,p75=3", "0", "-5"],
)
def test_invalid_contexts_are_refused(text):
    with pytest.raises(ConfigError, match="--context"):
        parse_context(text)


def test_the_busiest_group_equals_a_random_simulation():
    """Compares the closed form with randomly drawn rows, for evenly popular experts."""
    experts, top_k, rows = 64, 4, 512
    random = np.random.default_rng(3)
    for groups in (2, 8, 32):
        worst = []
        for _ in range(60):
            picks = np.argsort(random.random((rows, experts)), axis=1)[:, :top_k]
            counts = np.bincount(picks.ravel(), minlength=experts).reshape(groups, -1).sum(1)
            worst.append(counts.max() / counts.mean())
        spread = ExpertSpread("even", 0.0)
        found = spread.slowest(np.array([rows]), np.array([float(groups)]), experts, top_k)
        assert float(found[0]) == pytest.approx(np.mean(worst), rel=0.06)


def test_natural_loads_are_uneven_and_even_loads_are_not():
    assert 0.2 < load_spread().spread < 0.8
    assert EVEN_SPREAD.slowest(np.ones(1), np.full(1, 16.0), 64, 8) == 1.0


def test_efficiency_ideal_is_faster():
    fast = Search(request(efficiency=Efficiency(network=1.0, memory=1.0), gpus=32))
    slow = Search(request(gpus=32))
    assert fast.best_afd(fast.limits).score > slow.best_afd(slow.limits).score


def test_a_plan_has_a_shape_of_the_cost_model():
    point, _ = afd_operating(Search(request(gpus=32)).best_afd(Limits(0.05, 32)))
    assert isinstance(point.shape, AfdShape) and point.disaggregated
