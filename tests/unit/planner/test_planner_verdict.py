"""The verdict: its reasons and changes, with numbers checked against the search."""

import json
import math
from dataclasses import replace

import pytest
from planner_support import INSTANT, request, scaled

from afd_planner.cost.measured import load_measured
from afd_planner.cost.shape import Efficiency
from afd_planner.facts.precision import PRECISIONS
from afd_planner.sizing.decide import make_plan
from afd_planner.sizing.imbalance import ExpertSpread
from afd_planner.sizing.plan import ChangeKind, Constraint, ReasonKind
from afd_planner.sizing.search import Limits, Search
from afd_planner.sizing.verdict import ratio_at

ALL_FP8 = PRECISIONS["all-fp8"]
NO_FIXED_TIMES = Efficiency(
    attention_overhead_s=0,
    ffn_overhead_s=0,
    wire_latency_s=0,
    collective_latency_s=0,
    step_overhead_s=0,
)


def kinds(plan):
    return [reason.kind for reason in plan.verdict.reasons]


def test_a_winning_plan_has_no_reasons_against_it():
    asked = request("qwen3-235b-a22b", "h200", tpot_s=0.018, gpus=256, precision=ALL_FP8)
    plan = make_plan(replace(asked, efficiency=INSTANT))
    assert plan.verdict.disaggregate and plan.verdict.ratio >= plan.verdict.error.high
    assert plan.verdict.reasons == () and plan.chosen is plan.afd


def test_the_ratio_is_that_of_the_two_plans():
    plan = make_plan(request("deepseek-v3", gpus=64))
    assert plan.verdict.ratio == pytest.approx(plan.afd.tokens_per_s / plan.colocated.tokens_per_s)
    plan = make_plan(request("qwen3-235b-a22b", "h800", "h20"))
    per_dollar = plan.colocated.usd_per_million / plan.afd.usd_per_million
    assert plan.verdict.ratio == pytest.approx(per_dollar)


def test_a_dense_model_is_never_split():
    plan = make_plan(request("qwen3-32b", gpus=16))
    assert not plan.verdict.disaggregate and plan.chosen is plan.colocated
    assert kinds(plan)[0] is ReasonKind.DENSE_MODEL and plan.verdict.changes == ()


def test_too_few_gpus_names_the_number_that_is_enough():
    asked = request("qwen3-235b-a22b", "h200", tpot_s=0.018, gpus=24, precision=ALL_FP8)
    asked = replace(asked, efficiency=INSTANT)
    plan = make_plan(asked)
    assert not plan.verdict.disaggregate
    assert ReasonKind.TOO_FEW_GPUS in kinds(plan)
    (change,) = (c for c in plan.verdict.changes if c.kind is ChangeKind.GPUS)
    assert change.value > 24
    more = make_plan(replace(asked, gpus=int(change.value)))
    assert more.verdict.disaggregate and more.verdict.ratio == pytest.approx(change.ratio)


def test_no_unit_in_the_budget_is_a_reason():
    asked = request("qwen3-30b-a3b", gpus=1)
    search = Search(asked)
    assert search.smallest(disaggregated=False) == 1
    assert search.smallest(disaggregated=True) == 2
    plan = make_plan(asked)
    assert plan.afd is None and plan.verdict.ratio == 0
    assert ReasonKind.DOES_NOT_FIT in kinds(plan)


def test_the_dead_zone_is_named_where_rows_are_few():
    """A tight TPOT leaves few rows, and every micro-batch reads all experts again."""
    asked = request("deepseek-v3", "h200", tpot_s=0.015, gpus=64, efficiency=NO_FIXED_TIMES)
    plan = make_plan(replace(asked, depths=(3,), precision=ALL_FP8))
    assert not plan.verdict.disaggregate
    (reason,) = (r for r in plan.verdict.reasons if r.kind is ReasonKind.DEAD_ZONE)
    assert reason.value < reason.limit and reason.gain > 1.02
    assert reason.value == plan.afd.shape.rows


def test_the_network_and_the_sparsity_floor():
    """A row of DeepSeek-V3 uses 9/257 of the weights, too few for an H200 with a slow NIC."""
    asked = request("deepseek-v3", "h200", depths=(3,), gpus=64)
    plan = make_plan(scaled(asked, "nic_bandwidth", 0.3))
    assert not plan.verdict.disaggregate
    (reason,) = (r for r in plan.verdict.reasons if r.kind is ReasonKind.SPARSITY_FLOOR)
    assert reason.value == pytest.approx(9 / 257) and reason.limit > reason.value
    dense_enough = make_plan(scaled(request("step-3", "h20", depths=(3,)), "nic_bandwidth", 0.3))
    if not dense_enough.verdict.disaggregate:
        assert ReasonKind.SPARSITY_FLOOR not in kinds(dense_enough)


def test_kv_capacity_is_named_where_the_cache_is_small():
    asked = request("qwen3-235b-a22b", "h800", context=32768)
    plan = make_plan(asked)
    if plan.verdict.disaggregate:
        asked = scaled(asked, "nic_bandwidth", 0.5)
        plan = make_plan(asked)
    reasons = {reason.kind: reason for reason in plan.verdict.reasons}
    assert ReasonKind.KV_CAPACITY in reasons
    found = reasons[ReasonKind.KV_CAPACITY]
    assert found.limit > found.value > 0


def test_expert_imbalance_is_named_where_loads_are_uneven():
    asked = request("step-3", "mi300x", gpus=256, spread=ExpertSpread("uneven", 3.0))
    asked = replace(asked, redundant=(0,))
    asked = replace(asked, depths=(3,))
    plan = make_plan(asked)
    assert not plan.verdict.disaggregate
    (reason,) = (r for r in plan.verdict.reasons if r.kind is ReasonKind.EXPERT_IMBALANCE)
    assert reason.value > 1.1 and reason.gain > 1.02


def test_reasons_are_sorted_and_changes_are_true():
    plan = make_plan(request("qwen3-235b-a22b", "h20", gpus=64, tpot_s=0.02))
    assert not plan.verdict.disaggregate
    gains = [reason.gain for reason in plan.verdict.reasons]
    assert gains == sorted(gains, reverse=True) and all(gain > 1 for gain in gains)
    search = Search(plan.request)
    for change in plan.verdict.changes:
        assert change.ratio >= plan.verdict.error.high
        if change.kind is ChangeKind.TPOT:
            limits = Limits(change.value / 1e3, 64)
            assert ratio_at(search, limits) == pytest.approx(change.ratio)


def test_the_pareto_curve_rises_and_contains_the_plan():
    plan = make_plan(request("deepseek-v3", gpus=320))
    for pick in (lambda p: p.afd, lambda p: p.colocated):
        rates = [pick(point) for point in plan.pareto]
        assert rates[-1] > 0 and max(rates) <= rates[-1] * 1.15
    (own,) = (p for p in plan.pareto if p.tpot_s == plan.request.tpot_s)
    assert own.afd == pytest.approx(plan.afd.per_gpu)
    assert own.colocated == pytest.approx(plan.colocated.per_gpu)
    assert own.afd_per_usd == pytest.approx(1e6 / plan.afd.usd_per_million)


# -- measured stage times


@pytest.fixture
def measured(tmp_path):
    def write(**stages):
        path = tmp_path / "times.json"
        data = {"format": "afd-stage-times-1", "machine": "a test", **stages}
        path.write_text(json.dumps(data))
        return load_measured(path)

    return write


def test_measured_times_replace_the_model_and_are_named(measured):
    table = measured(
        attention=[{"rows": n, "context": 4096, "us": 50 + n} for n in (1, 64, 512)],
        ffn=[{"rows": n, "us": 100 + n / 20} for n in (1, 1024, 8192)],
    )
    asked = request("qwen3-30b-a3b", gpus=64, measured=table)
    plan = make_plan(asked)
    assert plan.afd.measured == ("attention", "ffn")
    layer = plan.stages.groups[0]
    shape = plan.afd.shape
    assert layer.attention.measured and layer.ffn.measured
    assert layer.attention.seconds == pytest.approx(
        (50 + shape.rows / shape.attention.groups) / 1e6
    )
    assert layer.ffn.seconds == pytest.approx((100 + shape.rows / 20) / 1e6, rel=1e-6)
    assert plan.afd.measured != make_plan(replace(asked, measured=None)).afd.measured == ()


def test_measured_times_apply_to_the_colocated_plan_too(measured):
    """On one GPU, a step is the attention and experts of all layers, plus the rest."""
    table = measured(
        attention=[{"rows": n, "context": 4096, "us": 100 + n} for n in (1, 512)],
        ffn=[{"rows": n, "us": 200 + 2 * n} for n in (1, 512)],
        rest=[{"rows": n, "us": 1000} for n in (1, 512)],
    )
    plan = make_plan(request("qwen3-30b-a3b", "mi355x", gpus=1, measured=table))
    rows, layers = plan.colocated.shape.rows, plan.request.model.num_layers
    assert plan.colocated.step_s == pytest.approx((layers * (300 + 3 * rows) + 1000) / 1e6)
    assert plan.colocated.binding is Constraint.FFN_STAGE


def test_slower_measurements_give_fewer_tokens(measured):
    def rate(us):
        points = [{"rows": n, "us": us * n} for n in (1, 100000)]
        search = Search(request("step-3", gpus=64, measured=measured(ffn=points)))
        return search.best_afd(search.limits).score

    assert rate(0.05) > rate(0.1) > rate(0.2)


def test_only_colocated_fits_or_only_afd():
    plan = make_plan(request("step-3", "h800", gpus=32))
    only = replace(plan, colocated=None)
    assert only.afd is not None and math.isfinite(plan.verdict.ratio)
