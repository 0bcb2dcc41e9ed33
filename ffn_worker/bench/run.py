"""A whole run of `afd bench moe` on one device."""

import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch

from afd.device_name import slug
from afd.errors import AfdError, ConfigError
from afd.wire.streams_torch import torch_device
from ffn_worker.bench import shapes
from ffn_worker.bench.layers import CACHE_BYTES, problem
from ffn_worker.bench.measure import Cell, cells, ours_and_vllm, races
from ffn_worker.bench.timing import ceilings, clock_of
from ffn_worker.bench.tune import read_space, tune
from ffn_worker.moe.choice import Choices, write_choices
from ffn_worker.moe.tiles import FOLDER, LayerShape, write_buckets

logger = logging.getLogger("afd.bench")


class Run:
    """Shapes and schemes on one device, in the order in which they were asked for.

    Args:
        device: "cpu" or "cuda". names: as `shapes.named` reads it. rows: () for all.

    Raises:
        ConfigError: there is no such device or shape.
    """

    def __init__(
        self, device: str, names: str, schemes: Sequence[str], rows: tuple[int, ...]
    ) -> None:
        if device != "cpu" and not torch.cuda.is_available():
            raise ConfigError("torch sees no GPU; use --device cpu --shapes tiny")
        self._device = torch_device(device)
        self._rows = rows or shapes.ROWS
        self._backends = ours_and_vllm(self._device)
        self._work: list[tuple[str, LayerShape]] = []
        for name, shape in shapes.named(names).items():
            found = (shapes.in_scheme(shape, scheme) for scheme in schemes)
            self._work += [(name, shape) for shape in found if shape is not None]
        self.left_out: list[str] = []
        self.failed: list[str] = []

    @cached_property
    def _ceilings(self) -> shapes.Ceilings:
        return ceilings(self._device)

    def words(self) -> str:
        """What is compared, and the ceilings, in two sentences."""
        flops = ", ".join(f"{k} {v / 1e12:.1f}" for k, v in self._ceilings.flops.items())
        return (
            f"Ours: backend {self._backends[0]}; vLLM: backend {self._backends[1]}. Ceilings: copy "
            f"{self._ceilings.bytes_per_s / 1e9:.0f} GB/s; matrix products {flops} TFLOP/s."
        )

    def tune(self, seconds: float, command: str, date: str) -> None:
        """Search tiles for every shape, and write them where the Triton backend reads them.

        Raises:
            ConfigError: tiles are of GPUs.
        """
        if self._device.type == "cpu":
            raise ConfigError("--tune searches tiles of GPU kernels; use --device cuda")
        device, hip = torch.cuda.get_device_name(self._device), torch.version.hip is not None
        space, ends = read_space(), time.monotonic() + seconds
        for index, (_, shape) in enumerate(self._work):
            share = (ends - time.monotonic()) / (len(self._work) - index)
            with problem(shape, self._device, cache_bytes=0) as one:
                named, buckets = tune(
                    one, self._rows, space, clock_of(self._device), hip, max(share, 1.0)
                )
            if buckets:
                file = FOLDER / slug(device) / f"{named.name}.json"
                write_buckets(file, device, named, buckets, command, date)

    def write_choices(self, cells: Sequence[Cell], command: str, date: str) -> Choices | None:
        """From ``cells``, which backend computes what, for the backend that takes any of them; None
        (and nothing is written) where only one was measured."""
        found = races(cells)
        if not found:
            return None
        return write_choices(torch.cuda.get_device_name(self._device), found, command, date)

    def cells(self, deadline: float) -> Iterator[Cell]:
        """Measured cells; begins none after ``deadline`` (time.monotonic): see ``left_out``.

        A shape that fails does not end the run: see ``failed``.
        """
        on_gpu = self._device.type != "cpu"
        modes = ("eager", "graph") if on_gpu and self._backends[0] == "triton" else ("eager",)
        cache = CACHE_BYTES if on_gpu else 0
        for name, shape in self._work:
            left = f"{name} {shape.scheme}"
            if time.monotonic() > deadline:
                self.left_out.append(left)
                continue
            try:
                with problem(shape, self._device, cache) as one:
                    for cell in cells(name, one, self._rows, modes, self._ceilings, self._backends):
                        yield cell
                        if time.monotonic() > deadline and cell.rows != self._rows[-1]:
                            self.left_out.append(f"{left} from {cell.rows} rows on")
                            break
            except (AfdError, RuntimeError) as error:  # wrong results; torch's and the device's
                self.failed.append(f"{left}: {error}")
