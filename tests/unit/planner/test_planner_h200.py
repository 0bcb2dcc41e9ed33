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
from afd_planner.sizing.error import CALIBRATED_ERROR, COMPOSED_ERROR, FITTED_ERROR, MODEL_ERROR

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


def largest_ratio_error(errors):
    return max(error.size for metric, error in errors if metric == "ratio_error")


def test_the_stated_errors_cover_every_measured_ratio():
    """Whatever the routing was: that of a plan is not known."""
    fitted, defaults = found_errors(RESULTS, counted=False)
    assert len([None for metric, _ in fitted if metric == "ratio_error"]) == 18
    for found, band in ((fitted, CALIBRATED_ERROR), (defaults, MODEL_ERROR)):
        assert largest_ratio_error(found) <= band.high == 1 / band.low
    assert largest_ratio_error(fitted) > CALIBRATED_ERROR.high * 0.97  # no wider than that


def test_the_error_of_rooflines_covers_every_measured_ratio():
    fitted, _ = found_errors(RESULTS, kernels=False, counted=False)
    largest = largest_ratio_error(fitted)
    assert FITTED_ERROR.high * 0.97 < largest <= FITTED_ERROR.high == 1 / FITTED_ERROR.low


def test_with_the_routing_counted_ratios_are_within_18_percent(errors):
    assert sum(e.counted for metric, e in errors[0] if metric == "ratio_error") == 4
    assert 1.16 < largest_ratio_error(errors[0]) < 1.18


def test_with_the_routing_counted_steps_of_random_weights_are_within_12_percent(errors):
    steps = [
        e.size
        for metric, e in errors[0]
        if metric == "step_error" and e.counted and e.method == "modelled" and not e.retired
    ]
    assert len(steps) == 30 and max(steps) < 1.12


def test_ratios_of_the_assumed_routing_are_within_8_percent_but_for_one_with_a_slow_host(errors):
    ratios = [error for metric, error in errors[0] if metric == "ratio_error" and not error.counted]
    sizes = {gpu: [e.size for e in ratios if e.gpu == gpu] for gpu in ("h200", "h100")}
    assert (len(sizes["h200"]), sum(size < 1.05 for size in sizes["h200"])) == (13, 11)
    assert sum(size < 1.08 for size in sizes["h200"]) == 12 and max(sizes["h200"]) < 1.14
    assert len(sizes["h100"]) == 1 and max(sizes["h100"]) < 1.03


def test_h100_is_predicted_from_the_efficiencies_of_h200(errors):
    """It is the same chip with other memory, and nothing is fitted to its cells."""
    fitted = [dict(load_accelerator(name).efficiency) for name in ("h100", "h200")]
    assert fitted[0] == fitted[1]
    steps = [e.size for name, e in errors[0] if name == "step_error" and e.gpu == "h100"]
    assert (len(steps), sum(size < 1.05 for size in steps)) == (9, 8) and max(steps) < 1.07


def test_the_composition_is_within_11_percent_but_for_one_with_a_slow_host(errors):
    found = [error for _, error in errors[0] if error.method == "composed"]
    composed = sorted(error.size for error in found if not error.retired)
    assert (len(found), len(composed)) == (51, 46)
    assert composed[-3] < 1.08 and composed[-2] < 1.11 and composed[-1] < 1.16
    assert COMPOSED_ERROR.high >= composed[-1] * composed[-2]


def test_steps_of_mixed_and_of_equal_lengths_are_within_9_percent(errors):
    """Of both servers; each prediction with the attention table of its own lengths."""
    sizes = [error.size for _, error in errors[0] if error.lengths]
    assert len(sizes) == 24 and max(sizes) < 1.09


def test_the_whole_model_is_within_5_percent_on_the_devices_and_in_the_server(errors):
    steps = [error for _, error in errors[0] if "48 layers" in error.cell and "1A1F" in error.cell]
    modelled = [error.size for error in steps if error.method == "modelled"]
    assert len(modelled) == 22 and max(modelled) < 1.05


def test_the_results_page_equals_the_output_of_the_bench(errors):
    page = (RESULTS / "planner.md").read_text()
    assert page == errors_page(*errors), "stale; run: afd bench planner --parts errors"
