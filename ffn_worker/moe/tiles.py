"""How the grouped kernels are cut: tuned tiles from data files, and a rule where there are none.

A file configs/tuning/DEVICE/SHAPE.json holds one tiling per row bucket, made by ``afd bench moe
--tune`` on that device. A batch takes the smallest bucket that holds it, a larger batch the
largest. Without a file for the device and the shape, and for a tiling that the shape cannot take,
:func:`default_tiling` decides. Pure; no torch.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from afd.device_name import slug
from afd.errors import ConfigError
from afd.planner.facts.files import CONFIGS

FOLDER = CONFIGS / "tuning"


@dataclass(frozen=True)
class LayerShape:
    """One MoE layer as one rank computes it.

    hidden, width: H and I of its routed experts (a TP shard has a fraction of I). experts: how many
    it holds, of num_experts. top_k: per row. scheme: of the weights, as in a deployment file.
    shared: width of a shared expert that is computed with the routed ones; 0: none.
    """

    hidden: int
    width: int
    experts: int
    num_experts: int
    top_k: int
    scheme: str
    shared: int = 0

    @property
    def name(self) -> str:
        """``h7168-w640-e24of48-k3-fp8_block-s320``."""
        name = f"h{self.hidden}-w{self.width}-e{self.experts}of{self.num_experts}-k{self.top_k}"
        return f"{name}-{self.scheme}" + (f"-s{self.shared}" if self.shared else "")


@dataclass(frozen=True)
class Tile:
    """One launch: columns and depth of a tile, and the programs' schedule. swap: FP8 weights times
    rows instead of rows times weights, which Hopper can do for fewer than 64 rows as well."""

    n: int
    k: int
    group_m: int
    warps: int
    stages: int
    swap: bool = False


@dataclass(frozen=True)
class Tiling:
    """Both launches of a layer. m: pairs per tile, the block in which they are sorted."""

    m: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class Bucket:
    """The tiling for up to ``rows`` rows. us, default_us: its time and that of the rule's."""

    rows: int
    tiling: Tiling
    us: float
    default_us: float


Tilings = Callable[[LayerShape, int], Tiling]
"""(shape, rows) -> how to cut them."""


def default_tiling(shape: LayerShape, rows: int, hip: bool) -> Tiling:
    """A tiling that runs everywhere.

    Args:
        hip: 64 KiB of LDS on gfx942 hold fewer stages. On Hopper, FP8 is multiplied in tiles of 64
            rows only: with fewer, Triton converts to float16 (seen in its PTX), which pays up to 16
            pairs per expert (H200).
    """
    quantised, fp8 = shape.scheme != "plain", shape.scheme == "fp8_block"
    load = rows * shape.top_k / shape.num_experts  # mean pairs per expert
    heights = (16, 32) if hip or not quantised else (16,) if fp8 else ()
    m = next((size for size in heights if load <= size), 64)
    if load >= 64 and not quantised and not hip:
        m = 128  # a matrix of 64 rows reads weights too often for Hopper

    def tile(depth: int) -> Tile:
        widest = 128 if quantised else 64
        k = next(size for size in (128, 64, 32) if size <= widest and depth % size == 0)
        return Tile(128, k, 8, 4 if m <= 32 else 8, 2 if hip else 3)

    return Tiling(m, tile(shape.hidden), tile(shape.width))


Part = Literal["gate_up", "down"]
PARTS: tuple[Part, Part] = ("gate_up", "down")


def problem(shape: LayerShape, tiling: Tiling, parts: tuple[Part, ...] = PARTS) -> str | None:
    """Why the kernels cannot be cut so, None if they can (registers and memory aside).

    Args:
        parts: the launches that are asked about.
    """
    if "gate_up" in parts:
        reason = _problem(shape, tiling.gate_up, shape.hidden, shape.width)
        if reason is not None:
            return reason
        if shape.scheme == "fp8_block" and tiling.gate_up.n % 128:
            return f"a tile of {tiling.gate_up.n} columns does not fill a scale of 128"
    if "down" in parts:
        return _problem(shape, tiling.down, shape.width, shape.hidden)
    return None


def _problem(shape: LayerShape, tile: Tile, depth: int, columns: int) -> str | None:
    if depth % tile.k:
        return f"a depth of {depth} is no multiple of {tile.k}"
    if tile.swap and (shape.scheme != "fp8_block" or tile.n > 128):
        return f"a tile of {tile.n} columns of {shape.scheme} weights is not swapped"
    if shape.scheme == "fp8_block" and tile.k > 128:
        return f"one scale covers 128 of the {tile.k} columns of an FP8 tile"
    if shape.shared and tile.k > 128:
        return f"the shared expert's width is a multiple of 128, not of {tile.k}"
    if shape.scheme != "plain" and columns % tile.n:
        return f"{columns} columns are no multiple of {tile.n}"
    return None


def read_buckets(file: Path) -> tuple[Bucket, ...]:
    """Buckets of one tuning file, by rows; none if there is no such file.

    Raises:
        ConfigError: the file is not what the tuner writes.
    """
    if not file.is_file():
        return ()
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))["buckets"]
        buckets = [
            Bucket(
                int(entry["rows"]),
                Tiling(
                    int(entry["tiling"]["m"]),
                    Tile(**entry["tiling"]["gate_up"]),
                    Tile(**entry["tiling"]["down"]),
                ),
                float(entry["us"]),
                float(entry["default_us"]),
            )
            for entry in entries
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file} is no tuning file ({error!r}); delete it or run afd bench moe --tune again"
        ) from None
    return tuple(sorted(buckets, key=lambda bucket: bucket.rows))


def write_buckets(
    file: Path, device: str, shape: LayerShape, buckets: tuple[Bucket, ...], command: str, date: str
) -> None:
    """Replaces a tuning file in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "device": device,
        "shape": asdict(shape),
        "command": command,
        "date": date,
        "buckets": [asdict(bucket) for bucket in buckets],
    }
    partial = file.with_name(file.name + ".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def pick(buckets: tuple[Bucket, ...], rows: int) -> Tiling | None:
    """The smallest bucket that holds ``rows``, else the largest; None without any."""
    if not buckets:
        return None
    return next((b for b in buckets if b.rows >= rows), buckets[-1]).tiling


def tuned_tilings(device: str, hip: bool, folder: Path = FOLDER) -> Tilings:
    """Tilings of a device: its tuning files, read once each, and the rule where they say nothing.

    Args:
        device: name as torch gives it, "NVIDIA H200".
    """
    here = folder / slug(device)

    @cache
    def buckets(shape: LayerShape) -> tuple[Bucket, ...]:
        return read_buckets(here / f"{shape.name}.json")

    def tiling(shape: LayerShape, rows: int) -> Tiling:
        tuned = pick(buckets(shape), rows)
        if tuned is None or problem(shape, tuned) is not None:
            return default_tiling(shape, rows, hip)
        return tuned

    return tiling
