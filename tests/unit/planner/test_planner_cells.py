"""Which cells of docs/results are compared with the planner."""

import argparse
from dataclasses import replace

import pytest

from afd.errors import ConfigError
from afd.records import Record
from afd_bench.gpu.common import TOKENS, add_routing, routed_case, routing_variables
from afd_bench.gpu.routing import Choices, read, write
from afd_bench.planner.cells import lengths_cells, ratio_cells, step_cells, with_loads
from afd_planner.facts.ffn import MoeFfn


def record(name: str, metric: str, machine: str) -> Record:
    return Record(
        bench="gpu",
        case=f"{name} 1A1F exact mqa lookahead depth 2 batch 128 context 4096",
        metric=metric,
        value=10.0,
        unit="",
        peer="vllm colocated",
        peer_value=20.0,
        ratio=0.5,
        machine=machine,
        command="",
        date="2026-01-01",
    )


def arguments(*argv: str, device: str = "cuda") -> argparse.Namespace:
    options = argparse.ArgumentParser()
    options.set_defaults(device=device)
    add_routing(options)
    return options.parse_args(argv)


@pytest.mark.parametrize(("routing", "even"), [("model", False), ("even", True)])
@pytest.mark.parametrize("gpu", ["H200", "H100 80GB HBM3"])
def test_a_cell_knows_its_routing_and_its_gpu(routing, even, gpu):
    args = arguments("--routing", routing)
    assert bool(routing_variables(args)) == even
    name = "qwen3-30b-coarse-mqa 24 layers fp8 cache" + routed_case(args)
    machine = f"32 cores Intel Xeon, 252 GiB, 2 x NVIDIA {gpu}"
    (ratio,) = ratio_cells([record(name, "tokens_per_s_per_gpu", machine)])
    step, served = step_cells([record(name, "device_step_ms", machine)])
    assert (step.served, served.served) == (False, True)
    for cell in (ratio, step, served):
        place = cell.place
        assert (place.even, place.counted, place.kv) == (even, False, "fp8")
        assert place.gpu == gpu.split()[0].lower()


def test_a_cell_takes_the_counts_of_its_own_load(tmp_path):
    """One with even routing takes none."""
    machine = "2 x NVIDIA H200"
    records = [
        record(f"qwen3-30b-coarse-mqa 24 layers fp8 cache{even}", "device_step_ms", machine)
        for even in ("", " even routing")
    ]
    file = tmp_path / "random_weights.json"
    rows = ((3, 1, 0, 0), (1, 1, 1, 1))
    cell = Choices("qwen3-30b-coarse-mqa", 24, "fp8", 128, 4096, rows)
    write(file, [cell, replace(cell, layers=12)], "afd bench gpu routing")
    write(file, [replace(cell, requests=256)], "afd bench gpu routing")
    assert len(read(file)) == 3
    model, _, even, _ = with_loads(step_cells(records), read(file))
    assert model.place.loads == ((0.75, 0.25, 0.0, 0.0), (0.25, 0.25, 0.25, 0.25))
    assert (model.place.counted, even.place.counted) == (True, False)


def test_experts_of_a_step_are_averaged_over_its_layers():
    """A row chooses two experts; in the first layer always the same two."""
    cell = Choices("a", 2, "fp8", 3, 16, ((5, 5, 0, 0), (1, 1, 1, 1)))
    assert cell.used(MoeFfn(8, 8, 4, 2)) == pytest.approx((2 + 4 * (1 - 0.5**3)) / 2)


def test_even_routing_is_refused_on_cpus():
    assert routing_variables(arguments(device="cpu")) == {}
    with pytest.raises(ConfigError, match="--routing even needs a GPU"):
        routing_variables(arguments("--routing", "even", device="cpu"))


def test_a_cell_has_the_tokens_that_its_requests_had_while_it_was_measured():
    machine = "2 x NVIDIA H200"
    step = record("qwen3-30b 12 layers", "device_step_ms", machine)
    rate = replace(step, metric="tokens_per_s_per_gpu")
    tokens = replace(step, metric=TOKENS, value=4300.0, peer="prompt")
    for records, expected in (([step, rate], 4096), ([step, rate, tokens], 4300)):
        cells = (*step_cells(records), *ratio_cells(records))
        assert len(cells) == 3
        for cell in cells:
            assert (cell.place.context, cell.place.tokens) == (4096, expected)
            assert cell.place == step_cells([step])[0].place


@pytest.mark.parametrize(
    ("server", "depth", "gpus"),
    [("TP1 graphs", 0, 1), ("1A1F exact lookahead depth 2", 2, 2)],
)
def test_a_cell_of_lengths_knows_its_server(server, depth, gpus):
    case = f"qwen3-30b 12 layers fp8 cache even routing {server} batch 64 context 16384"
    one = replace(record("", "step_ms", "2 x NVIDIA H200"), case=f"{case} mixed lengths")
    (cell,) = lengths_cells([one, replace(one, metric="tpot_ms"), replace(one, case=case)])
    assert (cell.depth, cell.target.gpus) == (depth, gpus)
    assert (cell.mixed_s, cell.equal_s) == (0.010, 0.020)
    assert (cell.place.kv, cell.place.even, cell.place.requests) == ("fp8", True, 64)
