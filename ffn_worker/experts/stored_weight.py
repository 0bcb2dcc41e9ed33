"""One weight of a checkpoint: finds and checks its tensors, reads slices of it."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from afd.models import Quantization
from afd.models.checkpoint import check_parts
from afd.models.stored_torch import StoredParts, decode
from afd.models.weight_format import (
    FLOATS,
    PLAIN,
    Layout,
    Part,
    Range,
    WeightFormat,
    tensor_name,
)
from afd.wire.layout import Tag
from ffn_worker.experts.tensor_files import Table, TensorFiles
from ffn_worker.moe.quantise import Weight, in_scheme
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.stored import as_weight, held_as


@dataclass(frozen=True)
class StoredWeight:
    """The weight [n, k] of a linear layer, of one expert or of all experts.

    name: of the tensor in an unquantised checkpoint. stacked: number of experts in the tensor's
    leading dimension; 0: it has none. transposed: plain tensors are [k, n].
    """

    name: str
    n: int
    k: int
    stored: WeightFormat
    stacked: int = 0
    transposed: bool = False

    @property
    def _parts(self) -> dict[str, Part]:
        n, k = (self.k, self.n) if self.transposed else (self.n, self.k)
        return self.stored.parts(n, k)

    def check(self, table: Table, path: object) -> None:
        """Checks the tensors' headers.

        Raises:
            ConfigError: one is missing or has another shape or dtype. The message names it and its
                file.
        """
        leading = (self.stacked,) if self.stacked else ()
        check_parts(table, path, self.name, self.stored, self._parts, leading)

    def nbytes(self, table: Table) -> int:
        """Returns the size of the tensors in the files; missing ones count nothing."""
        names = (tensor_name(self.name, suffix) for suffix in self._parts)
        return sum(table[name].nbytes for name in names if name in table)

    def held_as(self, rows: Range, columns: Range) -> Scheme:
        """Returns the scheme that holds W[rows, columns] with the numbers of the checkpoint."""
        cut = self.stored.cut(rows, columns, self.n, self.k)
        if self.transposed or (cut.rows, cut.columns) != (rows, columns):
            return Scheme.PLAIN
        return held_as(self.stored, rows[1] - rows[0], columns[1] - columns[0])

    def _is_as_stored(self, out: Weight, rows: Range, columns: Range) -> bool:
        """Whether ``out`` holds W[rows, columns] without decoding."""
        plain = out.scheme is Scheme.PLAIN
        if self.transposed or plain is self.stored.is_quantised:
            return False
        return out.scheme is self.held_as(rows, columns)

    def read_into(
        self,
        files: TensorFiles,
        out: Weight,
        rows: Range,
        columns: Range,
        *,
        expert: int = 0,
        interleaved: bool = False,
    ) -> None:
        """Fills ``out`` with W[rows, columns], as stored if ``out`` has that scheme, else decoded.

        A slice that ends inside a block is read with the whole block and decoded.

        Args:
            out: [rows, columns], on the device that computes.
            expert: for stacked tensors.
            interleaved: even rows of W fill the first half of ``out``, odd ones the second.
        """
        as_stored = self._is_as_stored(out, rows, columns)
        if as_stored and not interleaved:
            self._fill(files, out, rows, columns, expert)
            return
        cut = self.stored.cut(rows, columns, self.n, self.k)
        device = out.codes.device
        parts = self._read(files, cut.rows, cut.columns, expert, device)
        if as_stored and out.scheme is Scheme.MXFP4:  # scales belong to rows: they move with them
            _copy(out, as_weight(self.stored, parts), interleaved)
            return
        plain = decode(self.stored, parts)
        if self.transposed:
            plain = plain.T
        inside = [
            slice(a - begin, b - begin)
            for (a, b), (begin, _) in zip((rows, columns), (cut.rows, cut.columns), strict=True)
        ]
        plain = plain[inside[0], inside[1]]
        if interleaved:
            plain = torch.cat([plain[0::2], plain[1::2]])
        _copy(out, in_scheme(Weight.of(plain), out.scheme, Tag.E4M3FN, out.codes.dtype))

    def _fill(
        self, files: TensorFiles, out: Weight, rows: Range, columns: Range, expert: int
    ) -> None:
        """Reads straight into ``out``, without decoding; ``out`` has the scheme as stored."""
        for suffix, ranges, shape in self._reads(rows, columns, expert):
            name = tensor_name(self.name, suffix)
            if suffix == self.stored.codes:
                files.read_into(out.codes, name, ranges, shape=shape)
            elif self.stored.layout is Layout.FP8_TENSOR:
                assert out.scales is not None
                out.scales.fill_(files.read(name, ranges, shape=shape).float().item())
            else:
                assert out.scales is not None
                files.read_into(out.scales, name, ranges, shape=shape)

    def _read(
        self, files: TensorFiles, rows: Range, columns: Range, expert: int, device: torch.device
    ) -> StoredParts:
        """Returns W[rows, columns] as stored, on the device."""
        found: dict[str, torch.Tensor] = {}
        for suffix, ranges, shape in self._reads(rows, columns, expert):
            name = tensor_name(self.name, suffix)
            part = files.read(name, ranges, shape=shape, pinned=device.type == "cuda").to(device)
            found[suffix] = part.squeeze(0) if self.stacked else part
        stored = self.stored
        return StoredParts(
            found[stored.codes],
            found.get(stored.scales),
            found.get(stored.zeros),
            found.get(stored.order),
        )

    def _reads(
        self, rows: Range, columns: Range, expert: int
    ) -> Iterator[tuple[str, tuple[Range, ...], tuple[int, ...]]]:
        """Yields the last part of a tensor's name, the ranges to read and the tensor's shape."""
        if self.transposed:
            rows, columns = columns, rows
        n, k = (self.k, self.n) if self.transposed else (self.n, self.k)
        leading: tuple[int, ...] = (self.stacked,) if self.stacked else ()
        first: tuple[Range, ...] = ((expert, expert + 1),) if self.stacked else ()
        parts = self._parts
        for suffix, ranges in self.stored.cut(rows, columns, n, k).ranges.items():
            yield suffix, (*first, *ranges), (*leading, *parts[suffix].shapes[0])


def _copy(out: Weight, weight: Weight, interleaved: bool = False) -> None:
    if interleaved:
        halves = out.codes.shape[0] // 2
        for start, step in ((0, slice(0, None, 2)), (halves, slice(1, None, 2))):
            _copy(out[slice(start, start + halves)], weight[step])
        return
    out.codes.copy_(weight.codes)
    if out.scales is not None and weight.scales is not None:
        out.scales.copy_(weight.scales)


def stored_format(quantization: Quantization, table: Table, name: str) -> WeightFormat:
    """Returns the format of the weight ``name`` (as in an unquantised checkpoint).

    Publishers leave modules unquantised without always saying so in a way that fits the tensors'
    names, so a weight whose tensor is plain is plain.
    """
    found = quantization.of(name.removesuffix(".weight"))
    info = table.get(name)
    return PLAIN if info is not None and info.dtype in FLOATS else found
