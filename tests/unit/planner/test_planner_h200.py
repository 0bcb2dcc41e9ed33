"""Recomputes the table "Checked on H200" of docs/planner-model.md from the recorded results."""

import re
from pathlib import Path

import pytest

from afd.records import read_records
from afd_bench.gpu.checkpoint import listing
from afd_bench.gpu.predict import predict
from afd_bench.gpu.slices import find
from afd_bench.gpu.targets import PEER, Afd, Colocated
from afd_planner.cost.shape import Efficiency
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import from_config

RECORDS = Path(__file__).parents[3] / "docs/results/gpu.json"
CASE = re.compile(r"qwen3-30b 48 layers 1A1F exact lookahead depth (\d) batch (\d+) context (\d+)")
FITTED = Efficiency(
    memory=0.9,
    attention_overhead_s=25e-6,
    ffn_overhead_s=20e-6,
    step_overhead_s=0.5e-3,
    collective_latency_s=5e-6,
)


def measured():
    """Returns (target, depth, requests, context) -> measured seconds of a step."""
    found = {}
    for record in read_records(RECORDS):
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
    [(Efficiency(), (1.28, 1.43), (1.12, 1.20)), (FITTED, (0.96, 1.03), (0.98, 1.02))],
    ids=["defaults", "fitted"],
)
def test_predicted_over_measured(efficiency, colocated, split):
    model = from_config(listing(find("qwen3-30b", 48))[0], "qwen3-30b")
    gpu = load_accelerator("h200")
    ratios = {Afd: [], Colocated: []}
    for (target, depth, requests, context), seconds in measured().items():
        said = predict(target, depth, requests, context, model, gpu, efficiency)
        ratios[type(target)].append(said.tpot_s / seconds)
    assert (len(ratios[Colocated]), len(ratios[Afd])) == (5, 10)
    for kind, told in ((Colocated, colocated), (Afd, split)):
        assert (min(ratios[kind]), max(ratios[kind])) == pytest.approx(told, abs=0.006)
