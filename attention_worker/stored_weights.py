"""Reads the tensors of the attention half from a checkpoint. Imports no vLLM.

vLLM has readers and kernels for quantised linear layers on GPUs. On CPUs it has few, so quantised
weights are decoded here, and vLLM loads an unquantised model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from afd.models import Quantization, read_model, read_quantization
from afd.models.checkpoint import TensorInfo, tensor_table
from afd.models.family import Family
from afd.models.stored_torch import StoredParts, decode
from afd.models.weight_format import SUFFIXES, WeightFormat, tensor_name

Table = dict[str, TensorInfo]

_PLAIN_DTYPES = ("F32", "BF16", "F16")
_SCALES_OF_CACHE = ("k_scale", "v_scale", "q_scale", "prob_scale", "kv_scale", "output_scale")


@dataclass(frozen=True)
class StoredLinear:
    """A quantised weight. name: that of an unquantised checkpoint. parts: its tensors' names."""

    name: str
    stored: WeightFormat
    parts: dict[str, str]


def quantised_linears(
    table: Table, quantization: Quantization, family: Family
) -> dict[str, StoredLinear]:
    """Returns the quantised weights that are no experts', by the name of the tensor of codes."""
    found: dict[str, StoredLinear] = {}
    if not quantization.formats:
        return found
    for name, info in table.items():
        module, _, suffix = name.rpartition(".")
        stored = quantization.of(module)
        if not stored.is_quantised or suffix != stored.codes or family.is_expert_weight(name):
            continue
        if info.dtype not in _PLAIN_DTYPES:
            weight = f"{module}.weight"
            parts = {
                part: tensor_name(weight, part)
                for part in (stored.codes, stored.scales, stored.zeros, stored.order)
                if part
            }
            found[name] = StoredLinear(weight, stored, parts)
    return found


def attention_is_quantised(path: str | PathLike[str]) -> bool:
    """Whether weights that attention instances read are quantised. Raises ConfigError."""
    family, _ = read_model(path)
    return bool(quantised_linears(tensor_table(path), read_quantization(path), family))


class AttentionTensors:
    """Iterates over (name, tensor) of everything in a checkpoint but the experts, file by file.

    Attributes:
        bytes_read: size of the tensors that were read, in bytes.
        decoded: number of weights that were decoded.
        formats: of those weights.
    """

    def __init__(self, path: str | PathLike[str], *, decoding: bool) -> None:
        """decoding: decode quantised weights to float32, and leave out their scales."""
        self._table: Table = tensor_table(path)
        self._family, model = read_model(path)
        self._architecture = model.architecture
        self._linears: dict[str, StoredLinear] = {}
        if decoding:
            self._linears = quantised_linears(self._table, read_quantization(path), self._family)
        self._open: dict[Path, Any] = {}  # safetensors has no types
        self.bytes_read = 0

    @property
    def decoded(self) -> int:
        return len(self._linears)

    @property
    def formats(self) -> str:
        return ", ".join(sorted({str(linear.stored) for linear in self._linears.values()}))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names as vLLM's model class knows them. Raises ConfigError for a missing tensor"""
        skipped = self._parts_of_decoded()
        by_file = sorted(self._table, key=lambda name: self._table[name].file)
        for name in by_file:
            linear = self._linears.get(name)
            if linear is None and name in skipped:
                continue
            wanted = self._family.attention_name(
                self._architecture, name if linear is None else linear.name
            )
            if wanted is not None:
                yield wanted, self._read(name) if linear is None else self._decode(linear)
        self._open.clear()

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
