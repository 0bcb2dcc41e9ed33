"""A whole run of `afd bench moe` on one device."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from afd.errors import AfdError, ConfigError
from afd.host.device_name import slug
from afd.wire.streams_torch import torch_device
from afd_bench.moe import shapes
from afd_bench.moe.layers import CACHE_BYTES, problem
from afd_bench.moe.measure import Cell, cells, comparisons, ours_and_vllm, with_selection
from afd_bench.moe.timing import clock_of
from afd_bench.moe.tune import read_space, tune
from ffn_worker.moe.batch_selection import write_comparisons
from ffn_worker.moe.tiles import FOLDER, LayerShape, tuned_tilings, write_buckets

logger = logging.getLogger("afd_bench")


@dataclass(frozen=True)
class TuneOptions:
    """How to tune. command, date: written to the tuning files. tiles: search tiles, too."""

    command: str
    date: str
    tiles: bool = True


class Run:
    """Measures shapes and schemes on one device, in the given order.

    Args:
        device: "cpu" or "cuda". names: see `shapes.named`. rows: () for all. modes: "eager"; on
            GPUs also "graph", and "streams", which runs three micro-batches concurrently.

    Raises:
        ConfigError: the device or a shape does not exist.
    """

    def __init__(
        self,
        device: str,
        names: str,
        schemes: Sequence[str],
        rows: tuple[int, ...],
        modes: tuple[str, ...] = ("eager", "graph"),
    ) -> None:
        if device != "cpu" and not torch.cuda.is_available():
            raise ConfigError("torch sees no GPU; use --device cpu --shapes tiny")
        self._device = torch_device(device)
        self._rows = rows or shapes.ROWS
        self._backends = ours_and_vllm(self._device)
        graphs = device != "cpu" and self._backends[0] == "triton"
        self._modes = modes if graphs else ("eager",)
        self._work: list[tuple[str, LayerShape]] = []
        for name, shape in shapes.named(names).items():
            found = (shapes.in_scheme(shape, scheme) for scheme in schemes)
            self._work += [(name, shape) for shape in found if shape is not None]
        self.left_out: list[str] = []
        self.failed: list[str] = []

    def description(self) -> str:
        """Returns one line that names the compared backends."""
        return f"Ours: backend {self._backends[0]}; vLLM: backend {self._backends[1]}."

    def cells(self, deadline: float, tuned: TuneOptions | None = None) -> Iterator[Cell]:
        """Yields measured cells. Starts none after ``deadline`` (time.monotonic).

        ``left_out`` lists what was not measured, ``failed`` the shapes that failed; a failure does
        not end the run.

        Args:
            tuned: tune before measuring: search tiles (if enabled) and the fastest backends, and
                write both to the tuning files. The search takes half of the shape's share of time.

        Raises:
            ConfigError: tuning needs a GPU.
        """
        if tuned is not None and self._device.type == "cpu":
            raise ConfigError("--tune searches tiles of GPU kernels; use --device cuda")
        for index, (name, shape) in enumerate(self._work):
            left, now = f"{name} {shape.scheme}", time.monotonic()
            if now > deadline:
                self.left_out.append(left)
                continue
            try:
                if tuned is not None and tuned.tiles:
                    share = (deadline - now) / (len(self._work) - index)
                    self._tune(shape, max(share / 2, 1.0), tuned)
                found = []
                for cell in self._measured(name, shape, deadline):
                    found.append(cell)
                    if tuned is None:
                        yield cell
                if tuned is not None:
                    yield from self._with_fastest(found, tuned)
            # AfdError: wrong results. RuntimeError: torch or the device failed.
            except (AfdError, RuntimeError) as error:
                self.failed.append(f"{left}: {error}")

    def _tune(self, shape: LayerShape, seconds: float, tuned: TuneOptions) -> None:
        device, hip = torch.cuda.get_device_name(self._device), torch.version.hip is not None
        rows = tuple(count for count in self._rows if count in shapes.TUNED_ROWS) or self._rows
        with problem(shape, self._device, cache_bytes=0) as one:
            clock = clock_of(self._device)
            held = tuned_tilings(device, hip)
            named, buckets = tune(one, rows, read_space(), clock, hip, seconds, held)
        if buckets:
            file = FOLDER / slug(device) / f"{named.name}.json"
            write_buckets(file, device, named, buckets, tuned.command, tuned.date)

    def _measured(self, name: str, shape: LayerShape, deadline: float) -> Iterator[Cell]:
        cache = 0 if self._device.type == "cpu" else CACHE_BYTES
        with problem(shape, self._device, cache) as one:
            for cell in cells(name, one, self._rows, self._modes, self._backends):
                yield cell
                if time.monotonic() > deadline and cell.rows != self._rows[-1]:
                    self.left_out.append(f"{name} {shape.scheme} from {cell.rows} rows on")
                    break

    def _with_fastest(self, found: list[Cell], tuned: TuneOptions) -> list[Cell]:
        """Writes the comparisons to the tuning file; returns cells with the fastest backends."""
        run = comparisons(found)
        if not run:
            return found
        device = torch.cuda.get_device_name(self._device)
        selection = write_comparisons(device, run, tuned.command, tuned.date)
        return [with_selection(cell, selection) for cell in found]
