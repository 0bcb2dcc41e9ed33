"""Which cells of docs/results are compared with the planner."""

import argparse

import pytest

from afd.errors import ConfigError
from afd.records import Record
from afd_bench.gpu.common import add_routing, routed_case, routing_variables
from afd_bench.planner.cells import ratio_cells, step_cells


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


@pytest.mark.parametrize(
    ("routing", "even", "alike"), [("model", False, True), ("even", True, False)]
)
@pytest.mark.parametrize("gpu", ["H200", "H100 80GB HBM3"])
def test_a_cell_knows_its_routing_and_its_gpu(routing, even, alike, gpu):
    args = arguments("--routing", routing)
    assert bool(routing_variables(args)) == even
    name = "qwen3-30b-coarse-mqa 24 layers fp8 cache" + routed_case(args)
    machine = f"32 cores Intel Xeon, 252 GiB, 2 x NVIDIA {gpu}"
    (ratio,) = ratio_cells([record(name, "tokens_per_s_per_gpu", machine)])
    step, served = step_cells([record(name, "device_step_ms", machine)])
    assert (step.served, served.served) == (False, True)
    for cell in (ratio, step, served):
        place = cell.place
        assert (place.even, place.alike, place.kv) == (even, alike, "fp8")
        assert place.gpu == gpu.split()[0].lower()


def test_even_routing_is_refused_on_cpus():
    assert routing_variables(arguments(device="cpu")) == {}
    with pytest.raises(ConfigError, match="--routing even needs a GPU"):
        routing_variables(arguments("--routing", "even", device="cpu"))
