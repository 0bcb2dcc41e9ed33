"""Accelerators as data: configs/hardware/*.yaml, one file each, every value with its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from afd.errors import ConfigError
from afd.planner.facts.files import CONFIGS, read_yaml

FOLDER = CONFIGS / "hardware"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Partition:
    """A way to cut one GPU into ``parts`` devices (AMD compute and memory partitions).

    Each part has 1/parts of the compute, memory and bandwidth. warning: when it loses, with source.
    """

    name: str
    parts: int
    warning: str
    source: str


@dataclass(frozen=True)
class Accelerator:
    """One accelerator as data sheets describe it.

    flops: dense FLOP/s (or op/s) per number format; a missing format is not supported.
    memory_bytes: bytes. memory_bandwidth: bytes/s. scale_up_bandwidth: bytes/s per GPU and
    direction to the other GPUs of its server (NVLink, xGMI, HCCS; PCIe where there is none).
    nic_bandwidth: bytes/s per GPU and direction. price_per_hour: USD per GPU, rented.
    owned_price_per_hour: USD per GPU for who owns it (None: no source); never mix the two in one
    comparison. sources: field name -> where the value comes from.
    """

    name: str
    title: str
    vendor: str
    flops: Mapping[str, float]
    memory_bytes: float
    memory_bandwidth: float
    scale_up_bandwidth: float
    nic_bandwidth: float
    gpus_per_server: int
    price_per_hour: float
    partitions: tuple[Partition, ...]
    sources: Mapping[str, str]
    owned_price_per_hour: float | None = None

    def math_flops(self, dtype: str) -> float:
        """FLOP/s for matrix products whose inputs are stored as ``dtype``.

        A format without support is computed in the next wider one: mxfp4 in FP8, FP8 in BF16
        (Step-3 report section 4.1: INT8 weights and cache, computation in BF16 or FP16), float32
        on its own rate or else in BF16's passes.

        Raises:
            ConfigError: not even bfloat16 is listed.
        """
        for candidate in _FALLBACKS.get(dtype, (dtype, "bfloat16")):
            if candidate in self.flops:
                return self.flops[candidate]
        raise ConfigError(f"{self.name} lists no FLOP/s for {dtype} nor for a wider format")

    def roofline(self, dtype: str) -> float:
        """FLOPs per byte of memory traffic at which compute and bandwidth balance (Table 4)."""
        return self.math_flops(dtype) / self.memory_bandwidth


_FALLBACKS = {
    "mxfp4": ("mxfp4", "fp8", "bfloat16"),
    "fp8": ("fp8", "bfloat16"),
    "int8": ("int8", "bfloat16"),
    "float16": ("bfloat16",),
    "float32": ("float32", "bfloat16"),
}


class _Section(BaseModel):
    # not strict: YAML 1.1 takes 9.89e14 for text
    model_config = ConfigDict(extra="forbid", frozen=True)


class _PartitionFile(_Section):
    name: str
    parts: Annotated[int, Field(ge=2)]
    warning: str
    source: str


class _File(_Section):
    title: str
    vendor: str
    flops: dict[str, Positive]
    memory_bytes: Positive
    memory_bandwidth: Positive
    scale_up_bandwidth: Positive
    nic_bandwidth: Positive
    gpus_per_server: Annotated[int, Field(ge=1)]
    price_per_hour: Positive
    owned_price_per_hour: Positive | None = None
    partitions: tuple[_PartitionFile, ...] = ()
    sources: dict[str, str]


def accelerators() -> tuple[str, ...]:
    """Names of all accelerators in configs/hardware, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_accelerator(name: str) -> Accelerator:
    """The accelerator called ``name`` (``h800``, ``mi355x``; case does not matter).

    ``NAME/PARTITION`` (``mi300x/cpx-nps4``) gives one part of a partitioned GPU.

    Raises:
        ConfigError: no such accelerator or partition, or its file is wrong.
    """
    stem, _, partition = name.lower().partition("/")
    path = FOLDER / f"{stem}.yaml"
    if stem not in accelerators():
        raise ConfigError(
            f"accelerator {name!r} is unknown; use one of {', '.join(accelerators())}, "
            "or add a file to configs/hardware"
        )
    whole = read_accelerator(path)
    return _part(whole, partition) if partition else whole


def read_accelerator(path: Path) -> Accelerator:
    """The accelerator described by one YAML file. Raises ConfigError naming what is wrong in it."""
    file = read_yaml(path, _File)
    return Accelerator(
        name=path.stem,
        title=file.title,
        vendor=file.vendor,
        flops=file.flops,
        memory_bytes=file.memory_bytes,
        memory_bandwidth=file.memory_bandwidth,
        scale_up_bandwidth=file.scale_up_bandwidth,
        nic_bandwidth=file.nic_bandwidth,
        gpus_per_server=file.gpus_per_server,
        price_per_hour=file.price_per_hour,
        owned_price_per_hour=file.owned_price_per_hour,
        partitions=tuple(Partition(**p.model_dump()) for p in file.partitions),
        sources=file.sources,
    )


def _part(whole: Accelerator, name: str) -> Accelerator:
    for partition in whole.partitions:
        if partition.name == name:
            n = partition.parts
            return Accelerator(
                name=f"{whole.name}/{name}",
                title=f"{whole.title}, {name.upper()} partition",
                vendor=whole.vendor,
                flops={dtype: value / n for dtype, value in whole.flops.items()},
                memory_bytes=whole.memory_bytes / n,
                memory_bandwidth=whole.memory_bandwidth / n,
                scale_up_bandwidth=whole.scale_up_bandwidth / n,
                nic_bandwidth=whole.nic_bandwidth / n,
                gpus_per_server=whole.gpus_per_server * n,
                price_per_hour=whole.price_per_hour / n,
                partitions=(),
                sources=whole.sources,
            )
    known = ", ".join(p.name for p in whole.partitions) or "none"
    raise ConfigError(f"{whole.name} has no partition {name!r}; it has {known}")
