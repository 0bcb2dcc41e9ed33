"""Tile sizes of the grouped Triton kernels: tuned ones from data files, else a default rule.

``afd bench moe --tune`` writes ffn_worker/data/tuning/DEVICE/SHAPE.json, with one tiling per row
bucket. A batch uses the smallest bucket that holds it, or the largest one. :func:`default_tiling`
decides if there is no file for the device and shape, or if the shape does not support the tiling.
Pure; no torch.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from afd.errors import ConfigError
from afd.host.device_name import slug
from afd.host.package_data import data_folder

FOLDER = data_folder("ffn_worker") / "tuning"


@dataclass(frozen=True)
class LayerShape:
    """Shape of one MoE layer on one rank.

    hidden, width: H and I of the routed experts (a TP shard has a fraction of I). experts: held
    here, of num_experts in the model. top_k: experts per row. scheme: weight format, as in a
    deployment file. shared: width of a shared expert computed with the routed ones; 0: none.
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
        """Name of its tuning file, such as ``h7168-w640-e24of48-k3-fp8_block-s320``."""
        name = f"h{self.hidden}-w{self.width}-e{self.experts}of{self.num_experts}-k{self.top_k}"
        return f"{name}-{self.scheme}" + (f"-s{self.shared}" if self.shared else "")


@dataclass(frozen=True)
class Tile:
    """Tile of one launch.

    n: columns. k: columns of the inner dimension per step. group_m: blocks of pairs per column of
    tiles. swap: weights times rows instead of rows times weights (FP8 only); Hopper supports this
    also for fewer than 64 rows.
    """

    n: int
    k: int
    group_m: int
    warps: int
    stages: int
    swap: bool = False


@dataclass(frozen=True)
class Tiling:
    """Tiles of both launches of a layer. m: pairs per tile, the block size of the sort."""

    m: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class Bucket:
    """The tiling for up to ``rows`` rows.

    us, default_us: microseconds with this tiling and with that of the default rule.
    """

    rows: int
    tiling: Tiling
    us: float
    default_us: float


Tilings = Callable[[LayerShape, int], Tiling]
"""(shape, rows) -> tiling."""


def default_tiling(shape: LayerShape, rows: int, hip: bool) -> Tiling:
    """A tiling that works on every device and shape.

    Args:
        hip: whether the device is AMD's. The 64 KiB of LDS on gfx942 hold fewer stages.

    On Hopper, FP8 products need tiles of 64 rows. With fewer, Triton converts to float16 (seen in
    its PTX), which is faster only up to 16 pairs per expert (measured on H200).
    """
    quantised, fp8 = shape.scheme != "plain", shape.scheme == "fp8_block"
    load = rows * shape.top_k / shape.num_experts  # mean pairs per expert
    heights = (16, 32) if hip or not quantised else (16,) if fp8 else ()
    m = next((size for size in heights if load <= size), 64)
    if load >= 64 and not quantised and not hip:
        m = 128  # with 64 rows, Hopper would read the weights too often

    def tile(depth: int) -> Tile:
        widest = 128 if quantised else 64
        k = next(size for size in (128, 64, 32) if size <= widest and depth % size == 0)
        return Tile(128, k, 8, 4 if m <= 32 else 8, 2 if hip else 3)

    return Tiling(m, tile(shape.hidden), tile(shape.width))


Part = Literal["gate_up", "down"]
PARTS: tuple[Part, Part] = ("gate_up", "down")


def problem(shape: LayerShape, tiling: Tiling, parts: tuple[Part, ...] = PARTS) -> str | None:
    """Why the kernels do not support this tiling, None if they do. Ignores registers and memory.

    Args:
        parts: the launches to check.
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
        return f"a depth of {depth} is not a multiple of {tile.k}"
    if tile.swap and (shape.scheme != "fp8_block" or tile.n > 128):
        return f"a tile of {tile.n} columns of {shape.scheme} weights cannot be swapped"
    if shape.scheme == "fp8_block" and tile.k > 128:
        return f"one scale covers 128 of the {tile.k} columns of an FP8 tile"
    if shape.shared and tile.k > 128:
        return f"the shared expert's width is a multiple of 128, not of {tile.k}"
    if shape.scheme != "plain" and columns % tile.n:
        return f"{columns} columns are not a multiple of {tile.n}"
    return None


def read_buckets(file: Path) -> tuple[Bucket, ...]:
    """Buckets of one tuning file, ascending by rows; empty if the file does not exist.

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
            f"{file} is not a tuning file ({error!r}); delete it or run afd bench moe --tune again"
        ) from None
    return tuple(sorted(buckets, key=lambda bucket: bucket.rows))


def write_buckets(
    file: Path, device: str, shape: LayerShape, buckets: tuple[Bucket, ...], command: str, date: str
) -> None:
    """Writes a tuning file atomically."""
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
    """Tiling of the smallest bucket that holds ``rows``, else of the largest; None without any."""
    if not buckets:
        return None
    return next((b for b in buckets if b.rows >= rows), buckets[-1]).tiling


def tuned_tilings(device: str, hip: bool, folder: Path = FOLDER) -> Tilings:
    """Tilings of a device: from its tuning files, each read once, else from the default rule.

    Args:
        device: torch's name, such as "NVIDIA H200".
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
