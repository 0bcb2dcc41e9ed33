"""Which cores attention and FFN instance lend each other (afd/host/lent_cores_torch.py). Pure."""

from collections.abc import Sequence
from dataclasses import replace

from afd.config.roles import RoleSpec


def lend(specs: Sequence[RoleSpec]) -> list[RoleSpec]:
    """Returns the specs of a host with the cores that are lent.

    Only where one attention rank and one FFN rank are the whole deployment, and each has one core:
    several instances do not wait at the same time, and more compute threads of a process would have
    to spin between the parts of a decode step.
    """
    deployment = specs[0].deployment if specs else None
    if deployment is None or deployment.prefill.instances:
        return [*specs]
    attention, ffn = deployment.attention, deployment.ffn
    sides = [spec for spec in specs if spec.role in ("attention", "ffn")]
    cores = {spec.role: spec.cpus for spec in sides}
    alone = attention.capacity * attention.tp == ffn.capacity * ffn.tp == 1 and len(sides) == 2
    on_cpus = attention.device == ffn.device == "cpu" and ffn.threads == "auto"
    one_each = sorted(map(len, cores.values())) == [1, 1]
    if not (alone and on_cpus and one_each and cores["attention"] != cores["ffn"]):
        return [*specs]
    other = {"attention": cores["ffn"], "ffn": cores["attention"]}
    return [replace(spec, lent=other.get(spec.role, ())) for spec in specs]
