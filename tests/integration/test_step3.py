"""Step-3, 1A1F: tokens equal colocated vLLM's. tests/identity has the family without servers."""

import pytest
from deployments import Host, Models
from helpers import Running
from reference import References, same_tokens, weights_are_apart

pytestmark = [pytest.mark.serve, pytest.mark.long]


@pytest.fixture
def deployment(host: Host) -> Running:
    return host.serve("step3")


def test_tokens_are_those_of_colocated_vllm(deployment: Running, references: References) -> None:
    same_tokens(deployment.server, references("step3"), "step3")


def test_each_side_has_its_own_weights_only(deployment: Running, tiny_models: Models) -> None:
    weights_are_apart(deployment.metrics(), tiny_models("step3"), ffn_instances=1)
