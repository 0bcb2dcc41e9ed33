"""Recomputes the table "Checked on H200" of docs/planner-model.md from the recorded results."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from afd.records import read_records
from afd_bench.gpu.checkpoint import listing
from afd_bench.gpu.predict import predict
from afd_bench.gpu.slices import find
from afd_bench.gpu.targets import PEER, Afd, Colocated
from afd_bench.planner.command import found_errors
from afd_bench.planner.page import errors_page
from afd_planner.cost.shape import Efficiency, calibrated
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import from_config
from afd_planner.sizing.error import CALIBRATED_ERROR, COMPOSED_ERROR, MODEL_ERROR

RESULTS = Path(__file__).parents[3] / "docs/results"
CASE = re.compile(r"qwen3-30b 48 layers 1A1F exact lookahead depth (\d) batch (\d+) context (\d+)")
KERNELS = replace(calibrated((load_accelerator("h200"),)), equal_lengths=True)
FITTED = replace(KERNELS, kernels=False)


def measured():
    """Returns (target, depth, requests, context) -> measured seconds of a step."""
    found = {}
    for record in read_records(RESULTS / "gpu.json"):
        if (case := CASE.fullmatch(record.case)) is None:
            continue
        depth, requests, context = map(int, case.groups())
        if record.metric == "device_step_ms":
            found[Afd(1, 1), depth, requests, context] = record.value / 1e3
        elif record.peer == PEER:
            found[Colocated(2), 1, requests, context] = requests / record.peer_value / 2
    return found


@pytest.mark.parametrize(
    "efficiency,colocated,split",
    [
        (Efficiency(), (1.28, 1.43), (1.07, 1.13)),
        (FITTED, (0.96, 1.03), (1.00, 1.04)),
        (KERNELS, (0.93, 0.99), (0.96, 1.00)),
    ],
    ids=["defaults", "fitted", "kernels"],
)
def test_predicted_over_measured(efficiency, colocated, split):
    model = from_config(listing(find("qwen3-30b", 48))[0], "qwen3-30b")
    gpu = load_accelerator("h200")
    ratios = {Afd: [], Colocated: []}
    for (target, depth, requests, context), seconds in measured().items():
        said = predict(target, depth, requests, context, model, gpu, efficiency)
        on_device = isinstance(target, Afd)  # where neither logits nor sampling are
        ratios[type(target)].append((said.tpot_s - said.rest_s * on_device) / seconds)
    assert (len(ratios[Colocated]), len(ratios[Afd])) == (5, 10)
    for kind, told in ((Colocated, colocated), (Afd, split)):
        assert (min(ratios[kind]), max(ratios[kind])) == pytest.approx(told, abs=0.006)


@pytest.fixture(scope="module")
def errors():
    return found_errors(RESULTS)


def sizes(errors, wanted):
    """Returns the sizes of the errors of steps or ratios with ``wanted`` of metric and error."""
    return sorted(error.size for metric, error in errors if wanted(metric, error))


def ratios(errors, *, alike):
    return sizes(errors, lambda metric, e: metric == "ratio_error" and e.alike == alike)


def test_the_stated_errors_cover_every_measured_ratio(errors):
    """Whatever the routing was: that of a plan is not known. None is wider than that."""
    fitted, defaults = errors
    rooflines, _ = found_errors(RESULTS, kernels=False)
    for found, band in ((fitted, CALIBRATED_ERROR), (rooflines, MODEL_ERROR)):
        largest = max(ratios(found, alike=True) + ratios(found, alike=False))
        assert band.high * 0.99 < largest <= band.high == pytest.approx(1 / band.low)
    assert max(ratios(defaults, alike=True)) < MODEL_ERROR.high
    assert max(ratios(defaults, alike=False)) < MODEL_ERROR.high


def test_every_ratio_is_within_10_percent_where_routing_is_as_assumed(errors):
    found = ratios(errors[0], alike=False)
    assert len(found) == 17 and found[-2] < 1.08 and found[-1] < 1.10


def test_the_ratios_of_alike_rows_are_higher_than_predicted(errors):
    alike = [error.ratio for metric, error in errors[0] if metric == "ratio_error" and error.alike]
    assert len(alike) == 5 and 0.65 < min(alike) < max(alike) < 0.72


def test_steps_of_1a1f_are_within_10_percent_but_for_one_with_timestamps(errors):
    found = sizes(
        errors[0],
        lambda metric, e: (
            (metric, e.method, e.gpu) == ("step_error", "modelled", "h200")
            and not (e.alike or e.colocated or e.lengths)
        ),
    )
    assert len(found) == 91 and found[-2] < 1.10 and found[-1] < 1.11


def test_steps_of_colocated_vllm_are_within_10_percent_but_for_one(errors):
    found = sizes(errors[0], lambda metric, e: e.colocated and not e.alike)
    assert len(found) == 17 and found[-2] < 1.09 and found[-1] < 1.14


def test_h100_is_predicted_from_the_efficiencies_of_h200(errors):
    """It is the same chip with other memory, and nothing is fitted to its cells."""
    fitted = [dict(load_accelerator(name).efficiency) for name in ("h100", "h200")]
    assert fitted[0] == fitted[1]
    steps = [e.size for name, e in errors[0] if name == "step_error" and e.gpu == "h100"]
    assert (len(steps), sum(size < 1.05 for size in steps)) == (9, 8) and max(steps) < 1.07


def test_the_composition_is_within_10_percent(errors):
    found = [error for _, error in errors[0] if error.method == "composed"]
    assert len(found) == 55 and max(error.size for error in found) < 1.10
    span = max(error.ratio for error in found) / min(error.ratio for error in found)
    assert COMPOSED_ERROR.high * 0.99 < span <= COMPOSED_ERROR.high


def test_steps_of_mixed_and_of_equal_lengths_are_within_9_percent(errors):
    """Of both servers; each prediction with the attention table of its own lengths."""
    found = sizes(errors[0], lambda metric, e: e.lengths)
    assert len(found) == 24 and found[-1] < 1.09


def test_the_whole_model_is_within_5_percent_on_the_devices_and_in_the_server(errors):
    steps = [error for _, error in errors[0] if "48 layers" in error.cell and "1A1F" in error.cell]
    modelled = [error.size for error in steps if error.method == "modelled"]
    assert len(modelled) == 22 and max(modelled) < 1.05


def test_the_results_page_equals_the_output_of_the_bench(errors):
    page = (RESULTS / "planner.md").read_text()
    assert page == errors_page(*errors), "stale; run: afd bench planner --parts errors"
