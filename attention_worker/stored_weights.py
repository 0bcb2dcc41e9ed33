"""Reads the tensors of the attention half from a checkpoint. Imports no vLLM.

vLLM has readers and kernels for quantised linear layers on GPUs. On CPUs it has few, so quantised
weights are decoded here, and vLLM loads an unquantised model.
"""

import re
from collections.abc import Iterator
from math import prod
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from afd.models import read_model, read_quantization
from afd.models.checkpoint import check_parts, tensor_table
from afd.models.stored_torch import StoredParts, decode
from afd.models.weight_format import FLOATS, SUFFIXES
from attention_worker.quantised_linears import StoredLinear, Table, quantised_linears

_SCALES_OF_CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale")
_DRAFT = re.compile(r"model\.layers\.(\d+)\.")


def _is_draft(name: str, prefix: str, layers: int) -> bool:
    """Returns whether a tensor belongs to the draft layers: it begins with ``prefix``, or is of a
    layer behind the last of ``layers`` decoder layers."""
    if prefix:
        return name.startswith(prefix)
    found = _DRAFT.match(name)
    return found is not None and int(found[1]) >= layers


class AttentionTensors:
    """Iterates over (name, tensor) of everything in a checkpoint but the experts, file by file.

    Attributes:
        bytes_read: size of the tensors that were read, in bytes.
        decoded: number of weights that are decoded.
        formats: of those weights.
        current: the tensor that was handed out last, and its file; "": none, or all were.
    """

    def __init__(self, path: str | PathLike[str], *, decoding: bool, drafts: bool = False) -> None:
        """
        Args:
            decoding: decode quantised weights to float32, and leave out their scales.
            drafts: read the draft layers; False: everything else.

        Raises:
            ConfigError: a tensor of a weight to decode is missing, or has another shape or dtype.
        """
        self._family, model = read_model(path)
        self._table: Table = {
            name: info
            for name, info in tensor_table(path).items()
            if _is_draft(name, self._family.draft_prefix, model.num_layers) is drafts
        }
        self._architecture = model.architecture
        self._linears: dict[str, StoredLinear] = {}
        if decoding:
            self._linears = quantised_linears(self._table, read_quantization(path), self._family)
        for linear in self._linears.values():
            stored = linear.stored
            check_parts(self._table, path, linear.name, stored, stored.parts(linear.n, linear.k))
        self._open: dict[Path, Any] = {}  # safetensors has no types
        self.bytes_read = 0
        self.current = ""

    @property
    def decoded(self) -> int:
        return len(self._linears)

    @property
    def formats(self) -> str:
        return ", ".join(sorted({str(linear.stored) for linear in self._linears.values()}))

    def nbytes(self, itemsize: int) -> int:
        """Returns the size of the loaded weights in a dtype of ``itemsize`` bytes per value.

        Quantised weights that are not decoded count as stored. Reads only headers.
        """
        total = 0
        for name, _, linear in self._wanted():
            info = self._table[name]
            if linear is not None:
                total += linear.n * linear.k * itemsize
            elif info.dtype in FLOATS:
                total += prod(info.shape) * itemsize
            else:
                total += info.nbytes
        return total

    @property
    def stored_bytes(self) -> int:
        """Size of all tensors that are read, in bytes. Reads only headers."""
        return sum(
            self._table[part].nbytes
            for name, _, linear in self._wanted()
            for part in ((name,) if linear is None else linear.parts.values())
        )

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names as vLLM's model class knows them."""
        by_file = sorted(self._wanted(), key=lambda found: self._table[found[0]].file)
        for name, wanted, linear in by_file:
            self.current = f"tensor {name} of {self._table[name].file}"
            yield wanted, self._read(name) if linear is None else self._decode(linear)
        self.current = ""
        self._open.clear()

    def _wanted(self) -> Iterator[tuple[str, str, StoredLinear | None]]:
        """Yields names in the checkpoint, names of vLLM's model class, and what is decoded."""
        skipped = self._parts_of_decoded()
        for name in self._table:
            linear = self._linears.get(name)
            if linear is None and name in skipped:
                continue
            plain = name if linear is None else linear.name
            wanted = self._family.attention_name(self._architecture, plain)
            if wanted is not None:
                yield name, wanted, linear

    def _parts_of_decoded(self) -> set[str]:
        """Returns the names of all tensors that say something about decoded weights."""
        names: set[str] = set()
        for linear in self._linears.values():
            module = linear.name.removesuffix(".weight")
            names |= {f"{module}.{suffix}" for suffix in SUFFIXES if suffix != "bias"}
            names |= {f"{module}.{suffix}" for suffix in _SCALES_OF_CACHE}
            names |= {f"{module.rpartition('.')[0]}.{suffix}" for suffix in _SCALES_OF_CACHE}
        return names

    def _read(self, name: str) -> torch.Tensor:
        file = self._table[name].file
        if file not in self._open:
            self._open[file] = safe_open(str(file), framework="pt", device="cpu")
        tensor: torch.Tensor = self._open[file].get_tensor(name)
        self.bytes_read += tensor.nbytes
        return tensor

    def _decode(self, linear: StoredLinear) -> torch.Tensor:
        """Returns a weight, float32 [out, in]."""
        stored = linear.stored
        read = {part: self._read(name) for part, name in linear.parts.items()}
        parts = StoredParts(
            read[stored.codes],
            read.get(stored.scales),
            read.get(stored.zeros),
            read.get(stored.order),
        )
        return decode(stored, parts)
