"""The cases of `afd eval`: wire format, reduce format, depth, topology and dtype. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import get_args

from afd.config.choices import choices
from afd.config.deployment import Deployment
from afd.config.sections import Wire
from afd.errors import ConfigError

WIRES: tuple[str, ...] = get_args(Wire.model_fields["format"].annotation)
"""Every wire format of the deployment file, in the order of afd/config/sections.py."""

REDUCES: tuple[str, ...] = tuple(choices("reduce_format"))
"""Every reduce format for the ranks of an FFN instance, the exact one first. Partial sums of
several instances are always added exactly (attention_worker/remote/host.py)."""


@dataclass(frozen=True)
class Case:
    """One row of the results."""

    wire: str
    reduce: str
    depth: int
    topology: str
    dtype: str
    text: str

    @property
    def name(self) -> str:
        """A name such as ``fp8 exact 3 1A2F bfloat16 heldout``."""
        parts = (self.wire, self.reduce, str(self.depth), self.topology, self.dtype, self.text)
        return " ".join(parts)


def parse_case(name: str) -> Case:
    """Returns the case of a :attr:`Case.name`."""
    wire, reduce, depth, topology, dtype, text = name.split(maxsplit=5)
    return Case(wire, reduce, int(depth), topology, dtype, text)


@dataclass(frozen=True)
class Target:
    """One deployment under test, whose depth changes while it runs.

    tp: ranks of each FFN instance.
    """

    wire: str
    reduce: str
    attention: int
    ffn: int
    dtype: str
    tp: int = 1

    @property
    def topology(self) -> str:
        """A name such as ``1A2F``, or ``1A2F/TP2`` with two ranks per FFN instance."""
        ranks = f"/TP{self.tp}" if self.tp > 1 else ""
        return f"{self.attention}A{self.ffn}F{ranks}"

    def case(self, depth: int, text: str) -> Case:
        return Case(self.wire, self.reduce, depth, self.topology, self.dtype, text)

    @property
    def name(self) -> str:
        return f"{self.wire} {self.reduce} {self.topology} {self.dtype}"


def targets(
    attention: int,
    ffns: Sequence[int],
    dtype: str,
    wires: Sequence[str],
    tps: Sequence[int] = (1,),
    reduces: Sequence[str] = REDUCES,
) -> Iterator[Target]:
    """Yields the deployments of one dtype. Without ranks nothing is reduced: reduce is then exact.

    Raises:
        ConfigError: a format is unknown, or only lossy reduce formats are given with one rank.
    """
    for known, asked, what in ((WIRES, wires, "wire"), (REDUCES, reduces, "reduce")):
        for name in asked:
            if name not in known:
                raise ConfigError(f"{what} format {name!r} is unknown; use {' or '.join(known)}")
    if REDUCES[0] not in reduces and max(tps) == 1:
        raise ConfigError(
            f"--reduce {','.join(reduces)} has no effect on FFN instances of one rank; add --tp 2"
        )
    for ffn, tp, wire in product(ffns, tps, wires):
        for reduce in reduces if tp > 1 else REDUCES[:1]:
            yield Target(wire, reduce, attention, ffn, dtype, tp)


def deployment_file(
    base: Deployment, target: Target, depth: int, vllm_args: Sequence[str]
) -> dict[str, object]:
    """Returns the deployment file that runs ``base`` as ``target`` with all roles on this host.

    Args:
        depth: largest depth; a lower depth can be set while the deployment runs.
        vllm_args: appended to those of ``base`` and override them.
    """
    data = base.plain()
    data["attention"] |= {
        "dtype": target.dtype,
        "host": "127.0.0.1",
        "vllm_args": [*base.attention.vllm_args, *vllm_args],
    }
    if (target.ffn, target.tp) != (base.ffn.instances, base.ffn.tp):
        data["ffn"]["cpus"] = "auto"
    data["ffn"] |= {"instances": target.ffn, "tp": target.tp, "reduce": target.reduce}
    data["pipeline"]["depth"] = depth
    data["wire"]["format"] = target.wire
    data["transport"]["host"] = "127.0.0.1"
    data["control"]["keys"] = None
    data["restart"]["standby"] = False  # it would import what the servers need the cores for
    return data
