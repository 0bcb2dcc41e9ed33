"""`afd bench gpu`: what it deploys, and how it reads counters. The runs need GPUs: tests/gpu."""

from pathlib import Path

import pytest

from afd.bench.gpu import Variant, deployment, sample_sum
from afd.config import Deployment

EXPOSITION = """\
# TYPE afd_graph_steps counter
afd_graph_steps_total{depth="1",instance="attention-0"} 5
afd_graph_steps_total{depth="3",instance="attention-0"} 7
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",instance="attention-0"} 2
vllm:num_requests_running{engine="0",instance="attention-1"} 3
"""


@pytest.mark.parametrize("wire", ["exact", "fp8"])
@pytest.mark.parametrize("graphs", [True, False])
def test_what_is_deployed_is_a_valid_deployment(wire, graphs):
    plain = deployment(Path("m"), Variant(wire, graphs), 3, ["--max-logprobs=9"])
    config = Deployment.from_plain(plain)
    assert config.replays is graphs and config.wire.format == wire
    assert config.attention.vllm_args[-1] == "--max-logprobs=9"


def test_samples_are_summed_over_instances_and_picked_by_depth():
    assert sample_sum(EXPOSITION, "afd_graph_steps_total", 3) == 7
    assert sample_sum(EXPOSITION, "afd_graph_steps_total", 2) == 0
    assert sample_sum(EXPOSITION, "vllm:num_requests_running") == 5
