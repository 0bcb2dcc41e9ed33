"""A whole run of `afd bench moe` on one device."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from afd.device_name import slug
from afd.errors import AfdError, ConfigError
from afd.wire.streams_torch import torch_device
from ffn_worker.bench import shapes
from ffn_worker.bench.layers import CACHE_BYTES, problem
from ffn_worker.bench.measure import Cell, cells, ours_and_vllm, races, taken
from ffn_worker.bench.timing import clock_of
from ffn_worker.bench.tune import read_space, tune
from ffn_worker.moe.choice import write_races
from ffn_worker.moe.tiles import FOLDER, LayerShape, tuned_tilings, write_buckets

logger = logging.getLogger("afd.bench")


@dataclass(frozen=True)
class Tuned:
    """What tuning files say of how they were made. tiles: whether these are searched too."""

    command: str
    date: str
    tiles: bool = True


class Run:
    """Shapes and schemes on one device, in the order in which they were asked for.

    Args:
        device: "cpu" or "cuda". names: as `shapes.named` reads it. rows: () for all. modes:
            "eager", and where the device has graphs "graph" and "streams": three at a time, the
            time of one.

    Raises:
        ConfigError: there is no such device or shape.
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

    def words(self) -> str:
        """What is compared."""
        return f"Ours: backend {self._backends[0]}; vLLM: backend {self._backends[1]}."

    def cells(self, deadline: float, tuned: Tuned | None = None) -> Iterator[Cell]:
        """Measured cells; begins none after ``deadline`` (time.monotonic): see ``left_out``.

        A shape that fails does not end the run: see ``failed``.

        Args:
            tuned: first search tiles for each shape, if it says so, and then the quickest backends,
                and write both where the backends read them. A search takes half of the shape's
                share of the time.

        Raises:
            ConfigError: tiles are of GPUs.
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
                    yield from self._raced(found, tuned)
            except (AfdError, RuntimeError) as error:  # wrong results; torch's and the device's
                self.failed.append(f"{left}: {error}")

    def _tune(self, shape: LayerShape, seconds: float, tuned: Tuned) -> None:
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

    def _raced(self, found: list[Cell], tuned: Tuned) -> list[Cell]:
        """The cells with the backends that were quickest, which are written down."""
        run = races(found)
        if not run:
            return found
        device = torch.cuda.get_device_name(self._device)
        choices = write_races(device, run, tuned.command, tuned.date)
        return [taken(cell, choices) for cell in found]
