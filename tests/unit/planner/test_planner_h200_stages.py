"""The fixed times of attention on H200 follow from traces of single layers (docs/results/traces).

No step and no ratio of docs/results/gpu.json is used for them, so those are held out.
"""

import json
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from afd_bench.planner.cells import Place, StepCell
from afd_bench.planner.compare import modelled_stages
from afd_planner.cost.shape import calibrated
from afd_planner.facts.hardware import load_accelerator

TRACES = Path(__file__).parents[3] / "docs/results/traces"
LAYERS = {"qwen3-30b": 12, "qwen3-235b": 4, "step-3": 3, "deepseek-v3": 3}
KERNELS = ("qwen3-30b", "qwen3-235b", "step-3")  # one kernel: FlashAttention 3
MEASURED = replace(calibrated((load_accelerator("h200"),)), equal_lengths=True)
FITTED = replace(MEASURED, kernels=False)
BARE = replace(FITTED, attention_overhead_s=0, handover_s=0, latent_overhead_s=0)


@dataclass(frozen=True)
class Stage:
    """Attention of a layer with experts, microseconds: measured, its rooflines, and its kernels as
    they were measured one by one."""

    model: str
    rows: int
    context: int
    us: float
    roofline_us: float
    kernels_us: float

    @property
    def left_us(self) -> float:
        return self.us - self.roofline_us


def stages():
    """Returns every traced stage; the first layer, which has more to do, does not count."""
    found = []
    for path in sorted(TRACES.glob("*-c*-b64-d*.json")):
        model, _, tail = path.stem.partition("-1A1F-exact-c")
        context, depth = int(tail.split("-")[0]), int(tail[-1])
        spans = [
            event
            for event in json.loads(path.read_text())["traceEvents"]
            if event["ph"] == "X" and event["pid"] == 1 and "rows" in event["args"]
        ]
        layers = [int(event["name"].split()[1]) for event in spans]
        us = [s["dur"] for s, layer in zip(spans, layers, strict=True) if layer > min(layers)]
        cell = StepCell(Place(model, LAYERS[model], "bfloat16", 64, context), depth, 0.0)
        said = [
            g.attention.seconds * 1e6
            for efficiency in (BARE, MEASURED)
            for g in modelled_stages(cell, efficiency).groups
            if g.ffn is not None
        ]
        found.append(Stage(model, 64 // depth, context, statistics.mean(us), *said))
    return found


STAGES = stages()


def left_us(model: str) -> float:
    """Returns the mean that a model's rooflines leave. GQA at 32K says nothing about fixed times:
    one percent of the cache's bytes is as long."""
    return statistics.mean(
        stage.left_us
        for stage in STAGES
        if stage.model == model and (stage.context == 1024 or "qwen" not in model)
    )


def test_every_stage_is_there():
    assert len(STAGES) == 22


def test_the_fixed_time_is_the_mean_over_the_models():
    mean = statistics.mean(map(left_us, KERNELS))
    said = FITTED.attention_overhead_s + FITTED.handover_s
    assert said * 1e6 == pytest.approx(mean, abs=1.0)
    latent = left_us("deepseek-v3") * 1e-6
    assert said + FITTED.latent_overhead_s == pytest.approx(latent, abs=1.5e-6)


@pytest.mark.parametrize("model", KERNELS)
def test_two_models_predict_the_third_within_10_percent(model):
    fixed = statistics.mean(left_us(other) for other in KERNELS if other != model)
    for stage in STAGES:
        if stage.model == model and not (stage.rows < 64 and stage.context > 1024):
            assert stage.roofline_us + fixed == pytest.approx(stage.us, rel=0.1), stage


def test_mla_at_one_batch_follows_from_the_others():
    for left_out in STAGES:
        if left_out.model != "deepseek-v3":
            continue
        fixed = statistics.mean(
            s.left_us for s in STAGES if s.model == left_out.model and s.rows != left_out.rows
        )
        assert left_out.roofline_us + fixed == pytest.approx(left_out.us, rel=0.05)


def test_small_micro_batches_at_long_contexts_are_the_known_exception():
    (worst,) = (s for s in STAGES if s.model == "qwen3-30b" and s.context == 32768)
    assert worst.rows == 21 and worst.left_us == pytest.approx(91, abs=1)


def test_measured_kernels_need_no_fixed_time():
    """Nothing is fitted to the traces here."""
    for stage in STAGES:
        if stage.context == 1024:
            most = 17 if stage.model == "qwen3-30b" else 9
            assert abs(stage.us - stage.kernels_us) < most, stage
        elif stage.model in ("deepseek-v3", "step-3"):
            assert 1.0 < stage.kernels_us / stage.us < 1.1, stage
