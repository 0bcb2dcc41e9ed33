"""Whether a deployment's checkpoint can be divided among the ranks of an attention instance."""

import pytest

from afd.config.deployment import Deployment
from afd.config.resolve import resolve
from afd.errors import ConfigError
from afd_launch.rank_check import check_ranks


def deployed(checkpoint, **attention) -> Deployment:
    return Deployment.from_plain({"model": str(checkpoint), "attention": attention})


def test_heads_are_divided(tiny_models):
    model = tiny_models("qwen3_moe")
    for tp in (1, 2, 4):
        check_ranks(deployed(model, tp=tp))
    with pytest.raises(ConfigError, match=r"attention\.tp is 3, but the \d+ .* to 2$"):
        check_ranks(deployed(model, tp=3))


def test_a_rank_has_slots_for_its_share(tiny_models):
    deployment = deployed(tiny_models("qwen3_moe"), tp=4, instances=2, max_num_batched_tokens=66)
    resolved = resolve(deployment)
    assert resolved.contract.capacity_rows == resolved.a2f.capacity == 17
    assert resolved.slots.attention_ranks == 8
    assert (resolved.contract.attention_instances, resolved.contract.attention_tp) == (2, 4)


def test_a_rank_needs_a_core():
    with pytest.raises(ValueError, match="cpus has a list with fewer cores than tp, 2"):
        deployed("m", tp=2, cpus=[[3]])
