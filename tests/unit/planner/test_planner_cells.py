"""Which cells of docs/results are compared with the planner."""

import argparse
from dataclasses import replace

import pytest

from afd.errors import ConfigError
from afd.records import Record
from afd_bench.gpu.common import TOKENS, add_routing, routed_case, routing_variables
from afd_bench.planner.cells import alike_places, lengths_cells, ratio_cells, step_cells


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
        assert (place.even, place.kv) == (even, "fp8")
        assert place.gpu == gpu.split()[0].lower()


def test_rows_are_alike_where_the_same_cell_was_measured_with_even_routing():
    """On the same kind of GPU."""
    cells = [
        cell
        for name, gpu in (
            ("qwen3-30b 12 layers", "H200"),
            ("step-3 3 layers", "H200"),
            ("step-3 3 layers even routing", "H200"),
            ("deepseek-v3 3 layers", "H200"),
            ("deepseek-v3 3 layers even routing", "H100"),
        )
        for cell in step_cells([record(name, "device_step_ms", f"2 x NVIDIA {gpu}")])
    ]
    (alike,) = alike_places(cells)
    assert (alike.model, alike.even) == ("step-3", False)


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
