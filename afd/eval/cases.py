"""What `afd eval` runs: every wire format, reduce format, depth, topology and dtype. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from afd.config import Deployment, Wire
from afd.errors import ConfigError

WIRES: tuple[str, ...] = get_args(Wire.model_fields["format"].annotation)
"""Every wire format that a deployment file may name, in its order (afd/config.py)."""

REDUCES: Mapping[str, Mapping[str, Mapping[str, object]]] = {"sum": {}}
"""How partial results of several FFN instances become one -> what it sets in a deployment file, by
section. ``sum`` adds them up in float32 (attention_worker/remote.py) and is all there is so far."""


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
        """``fp8 sum 3 1A2F bfloat16 heldout``."""
        parts = (self.wire, self.reduce, str(self.depth), self.topology, self.dtype, self.text)
        return " ".join(parts)


def parse_case(name: str) -> Case:
    """Inverse of :attr:`Case.name`."""
    wire, reduce, depth, topology, dtype, text = name.split(maxsplit=5)
    return Case(wire, reduce, int(depth), topology, dtype, text)


@dataclass(frozen=True)
class Target:
    """One deployment under test; its depth is switched while it runs."""

    wire: str
    reduce: str
    attention: int
    ffn: int
    dtype: str

    @property
    def topology(self) -> str:
        return f"{self.attention}A{self.ffn}F"

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
    reduces: Sequence[str] = tuple(REDUCES),
) -> Iterator[Target]:
    """Deployments of one dtype. With one FFN instance nothing is reduced, so one reduce is run.

    Raises:
        ConfigError: a format that is not known.
    """
    for known, asked, what in ((WIRES, wires, "wire"), (REDUCES, reduces, "reduce")):
        for name in asked:
            if name not in known:
                raise ConfigError(f"{what} format {name!r} is not known; use {' or '.join(known)}")
    for ffn in ffns:
        for wire in wires:
            for reduce in reduces if ffn > 1 else reduces[:1]:
                yield Target(wire, reduce, attention, ffn, dtype)


def deployment_file(
    base: Deployment, target: Target, depth: int, vllm_args: Sequence[str]
) -> dict[str, object]:
    """Contents of the file that runs ``base`` as ``target`` with all roles on this host.

    Args:
        depth: the most micro-batches; fewer are set while it runs.
        vllm_args: added to those of ``base``, which they override.
    """
    data = base.plain()
    data["attention"] |= {
        "dtype": target.dtype,
        "host": "127.0.0.1",
        "vllm_args": [*base.attention.vllm_args, *vllm_args],
    }
    if target.ffn != base.ffn.instances:
        data["ffn"] |= {"instances": target.ffn, "cpus": "auto"}
    data["pipeline"]["depth"] = depth
    data["wire"]["format"] = target.wire
    data["transport"]["host"] = "127.0.0.1"
    data["control"]["keys"] = None
    for section, values in REDUCES[target.reduce].items():
        data[section] |= values
    return data
