"""Which cores the two sides of a deployment lend each other."""

import pytest

from afd.config.deployment import Deployment
from afd_launch.roles_of_host import Ports, role_specs

PORTS = Ports(8000, (8100, 8101), "tcp://127.0.0.1:1")


def lent(cores, **sections):
    data = {"model": "m", "served_model_name": "m", **sections}
    specs = role_specs(Deployment.from_plain(data), PORTS, cores)
    return {spec.id: (spec.cpus, spec.lent) for spec in specs if spec.role in ("attention", "ffn")}


def test_one_core_each_is_lent():
    assert lent([4, 7]) == {"attention-0": ((4,), (7,)), "ffn-0": ((7,), (4,))}


@pytest.mark.parametrize(
    ("cores", "sections"),
    [
        ([0, 1, 2, 3], {}),
        ([0], {}),
        ([0, 1], {"attention": {"instances": 2}}),
        ([0, 1], {"ffn": {"instances": 2}}),
        ([0, 1], {"ffn": {"tp": 2}}),
        ([0, 1], {"ffn": {"max_instances": 2}}),
        ([0, 1], {"ffn": {"threads": 1}}),
        ([0, 1], {"attention": {"device": "cuda"}, "ffn": {"device": "cuda"}}),
    ],
)
def test_nothing_else_is(cores, sections):
    assert all(not borrowed for _, borrowed in lent(cores, **sections).values())
