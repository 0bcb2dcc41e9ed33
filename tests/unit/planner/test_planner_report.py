"""Table, JSON, HTML and PNG of a plan show the plan's numbers."""

import json
import math
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from planner_support import INSTANT, request

from afd_planner.cost.stages import layer_period
from afd_planner.facts.precision import PRECISIONS
from afd_planner.report.as_json import SCHEMA, plan_data
from afd_planner.report.text import render
from afd_planner.report.timeline import LANES, busy, timeline
from afd_planner.report.verdict_text import change_text, reason_text
from afd_planner.sizing.decide import make_plan
from afd_planner.sizing.plan import Change, ChangeKind, Reason, ReasonKind


@pytest.fixture(scope="module")
def wins():
    asked = request("qwen3-235b-a22b", "h200", tpot_s=0.018, gpus=256, efficiency=INSTANT)
    return make_plan(replace(asked, precision=PRECISIONS["all-fp8"]))


@pytest.fixture(scope="module")
def loses():
    return make_plan(request("deepseek-v3", "h200", context=1024, gpus=8))


def test_the_table_shows_both_plans(wins):
    text = render(wins)
    assert "Qwen3-235B-A22B on h200, 4096 tokens, TPOT <= 18 ms, up to 256 GPUs" in text
    assert f"{wins.afd.tokens_per_s:,.0f}" in text and f"{wins.colocated.per_gpu:,.0f}" in text
    shape = wins.afd.shape
    assert f"{shape.attention.instances}A{shape.ffn.instances}F" in text
    assert f"depth {shape.depth}, {shape.precision.wire} wire" in text
    assert wins.afd.binding.value in text and "\nDisaggregate: " in text
    assert "modelled: attention, ffn, wire, rest" in text and "measured:" not in text


def test_the_verdict_against_it_names_reasons_and_what_would_change_it(loses):
    text = render(loses)
    assert "Do NOT disaggregate: " in text
    for reason in loses.verdict.reasons:
        assert f"  - {reason_text(reason)}" in text
    for change in loses.verdict.changes:
        assert change_text(change) in text


def test_the_table_says_that_only_xayf_fits():
    plan = make_plan(request("deepseek-v3", "h200", gpus=7))
    assert plan.colocated is None and plan.chosen is plan.afd
    assert "no colocated plan fits" in render(plan)
    assert plan_data(plan)["verdict"]["ratio"] is None


def test_an_architecture_that_is_not_served_is_noted(wins):
    assert "not served" not in render(wins)
    text = render(make_plan(request("pangu-pro-moe", gpus=16)))
    assert "not served: afd serve does not run PanguProMoEForCausalLM" in text
    assert "Do NOT disaggregate" in text
    drafting = render(make_plan(request("step-3", "h200", gpus=16, positions=2, accepted=1.7)))
    assert "not served" not in drafting


@pytest.mark.parametrize("kind", ReasonKind)
def test_every_reason_has_a_text(kind):
    for limit in (7.0, math.inf):
        assert len(reason_text(Reason(kind, 3.0, limit, "unit", 1.5))) > 20
    assert "1.50x" in reason_text(Reason(kind, 3.0, 7.0, "unit", 1.5))


@pytest.mark.parametrize("kind", ChangeKind)
def test_every_change_has_a_text(kind):
    assert "(1.10x)" in change_text(Change(kind, 96, 1.1))


def test_json_says_what_the_plan_says(loses):
    data = json.loads(json.dumps(plan_data(loses), allow_nan=False))
    assert data["schema"] == SCHEMA
    assert data["verdict"]["disaggregate"] is False
    assert data["verdict"]["decision"] == "colocated"
    assert data["verdict"]["error"]["high"] == loses.verdict.error.high
    assert set(data["verdict"]["by_expert_load"]) == {"equal", "afd-tiny-chat", "worst"}
    assert [r["kind"] for r in data["verdict"]["reasons"]] == [
        reason.kind.name.lower() for reason in loses.verdict.reasons
    ]
    assert data["disaggregated"]["unit"]["depth"] == loses.afd.shape.depth
    assert data["colocated"]["tokens_per_s"] == loses.colocated.tokens_per_s
    assert data["request"]["objective"] == "tokens"
    assert data["stages"]["layers"][0]["attention_us"] > 0
    assert data["modelled"] == ["attention", "ffn", "wire", "rest"] and data["measured"] == []


def test_json_without_an_xayf_plan(loses):
    data = plan_data(replace(loses, afd=None, stages=None))
    assert data["disaggregated"] is None and data["stages"] is None


# -- the timeline


def test_the_timeline_is_a_pipeline(wins):
    depth = wins.afd.shape.depth
    spans = timeline(wins.stages, depth, layers=6)
    assert len(spans) == 6 * depth * len(LANES)
    for lane in LANES:
        own = sorted((s for s in spans if s.lane == lane), key=lambda s: s.begin)
        assert [(s.layer, s.micro_batch) for s in own] == [
            (layer, mb) for layer in range(6) for mb in range(depth)
        ]
        assert all(a.end <= b.begin + 1e-12 for a, b in pairwise(own))
        assert 0 < busy(spans, lane) <= 1


def test_the_timeline_keeps_the_closed_form_period(wins):
    depth = wins.afd.shape.depth
    spans = timeline(wins.stages, depth, layers=40)
    begins = [s.begin for s in spans if s.lane == "attention" and s.micro_batch == 0]
    period = (begins[-1] - begins[20]) / 19
    group = max(wins.stages.groups, key=lambda g: len(g.layers))
    assert period == pytest.approx(layer_period(group, depth), rel=0.02)


# -- plots


def test_html_is_one_file_with_three_plots(wins):
    pytest.importorskip("matplotlib", reason="the extra plan is not installed")
    from afd_planner.report.html import html

    text = html(wins)
    assert text.count("<svg") == 3 and "<script" not in text
    outside = set(re.findall(r'(?:src|href)="(?!#)([^"]+)"', text))
    assert not outside, f"the report refers to {outside}"
    assert "Disaggregate:" in text and f"{wins.afd.per_gpu:,.0f}" in text
    assert text == html(wins)


def test_png_of_a_plan_without_xayf(loses):
    pytest.importorskip("matplotlib", reason="the extra plan is not installed")
    from afd_planner.report.plots import png

    assert png(replace(loses, afd=None, stages=None)).startswith(b"\x89PNG")


def test_without_matplotlib_one_sentence_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from afd.errors import ConfigError\n"
        "try:\n import afd_planner.report.plots\n"
        "except ConfigError as err: print(err)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "--report needs matplotlib" in done.stdout and 'pip install "afd[plan]"' in done.stdout


def test_the_planner_needs_no_torch_and_no_matplotlib():
    code = (
        "import sys, afd_planner.command\n"
        "heavy = {'torch', 'vllm', 'matplotlib', 'zmq'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
