"""Accelerators: one file each in afd_planner/data/hardware, with a source for every value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from afd.devices import CUDA, ROCM
from afd.errors import ConfigError
from afd_planner.facts.files import DATA, read_yaml

FOLDER = DATA / "hardware"

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Partition:
    """A mode that divides one GPU into ``parts`` devices (AMD compute and memory partitions).

    Each part has 1/parts of the compute, memory and bandwidth. ``warning`` says when partitioning
    costs performance, ``source`` where that was measured.
    """

    name: str
    parts: int
    warning: str
    source: str


@dataclass(frozen=True)
class Accelerator:
    """Data-sheet values of one accelerator.

    Attributes:
        flops: Dense FLOP/s (or integer op/s) per number format. A missing format is unsupported.
        memory_bytes: Bytes of GPU memory.
        memory_bandwidth: Bytes/s.
        scale_up_bandwidth: Bytes/s per GPU and direction to the other GPUs of the server (NVLink,
            xGMI, HCCS, or PCIe if the server has none of them).
        nic_bandwidth: Bytes/s per GPU and direction.
        price_per_hour: USD per GPU, rented.
        owned_price_per_hour: USD per GPU for an owner; None if no source states it. Never mix
            rented and owned prices in one comparison.
        sources: Field name to the source of its value.
        architecture: LLVM's name of an AMD GPU, such as gfx942; None for other makers.
        efficiency: Fields of ``cost.shape.Efficiency`` that were fitted to measurements on it.
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
    architecture: str | None = None
    efficiency: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device of a deployment on it. Of other makers than AMD only NVIDIA can be served."""
        return ROCM.name if self.vendor == "amd" else CUDA.name

    def math_flops(self, dtype: str) -> float:
        """Returns the FLOP/s of matrix products whose inputs are stored as ``dtype``.

        A format that the accelerator does not support runs at the rate of the next wider one: mxfp4
        as FP8, FP8 and INT8 as BF16 (Step-3 report section 4.1), float32 as BF16.

        Raises:
            ConfigError: The accelerator lists neither the format nor a fallback.
        """
        for candidate in _FALLBACKS.get(dtype, (dtype, "bfloat16")):
            if candidate in self.flops:
                return self.flops[candidate]
        raise ConfigError(
            f"{self.name} lists no FLOP/s for {dtype} or a wider format; choose another --precision"
        )

    def roofline(self, dtype: str) -> float:
        """Returns the FLOPs per byte at which compute and memory bandwidth balance (Table 4)."""
        return self.math_flops(dtype) / self.memory_bandwidth


_FALLBACKS = {
    "mxfp4": ("mxfp4", "fp8", "bfloat16"),
    "fp8": ("fp8", "bfloat16"),
    "int8": ("int8", "bfloat16"),
    "float16": ("bfloat16",),
    "float32": ("float32", "bfloat16"),
}


class _Section(BaseModel):
    # Not strict, because YAML 1.1 reads 9.89e14 as text.
    model_config = ConfigDict(extra="forbid", frozen=True)


class _PartitionFile(_Section):
    name: str
    parts: Annotated[int, Field(ge=2)]
    warning: str
    source: str


class _File(_Section):
    title: str
    vendor: str
    architecture: str | None = None
    flops: dict[str, Positive]
    memory_bytes: Positive
    memory_bandwidth: Positive
    scale_up_bandwidth: Positive
    nic_bandwidth: Positive
    gpus_per_server: Annotated[int, Field(ge=1)]
    price_per_hour: Positive
    owned_price_per_hour: Positive | None = None
    efficiency: dict[str, Positive] = {}
    partitions: tuple[_PartitionFile, ...] = ()
    sources: dict[str, str]


def accelerators() -> tuple[str, ...]:
    """Returns the sorted names of all accelerators that come with the planner."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def load_accelerator(name: str) -> Accelerator:
    """Returns the accelerator ``name``, e.g. ``h800``, ignoring case.

    ``NAME/PARTITION``, e.g. ``mi300x/cpx-nps4``, returns one part of a partitioned GPU.

    Raises:
        ConfigError: The accelerator or partition is unknown, or its file is invalid.
    """
    stem, _, partition = name.lower().partition("/")
    path = FOLDER / f"{stem}.yaml"
    if stem not in accelerators():
        raise ConfigError(
            f"accelerator {name!r} is unknown; use one of {', '.join(accelerators())}"
        )
    whole = read_accelerator(path)
    return _part(whole, partition) if partition else whole


def read_accelerator(path: Path) -> Accelerator:
    """Returns the accelerator of one YAML file. Raises ConfigError if the file is invalid."""
    file = read_yaml(path, _File)
    return Accelerator(
        name=path.stem,
        title=file.title,
        vendor=file.vendor,
        architecture=file.architecture,
        flops=file.flops,
        memory_bytes=file.memory_bytes,
        memory_bandwidth=file.memory_bandwidth,
        scale_up_bandwidth=file.scale_up_bandwidth,
        nic_bandwidth=file.nic_bandwidth,
        gpus_per_server=file.gpus_per_server,
        price_per_hour=file.price_per_hour,
        owned_price_per_hour=file.owned_price_per_hour,
        efficiency=file.efficiency,
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
                architecture=whole.architecture,
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
    raise ConfigError(f"{whole.name} has no partition {name!r}; known partitions: {known}")
