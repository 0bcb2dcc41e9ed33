"""Reads the expert weights of one FFN rank from safetensors, and nothing else.

Block-scaled FP8 weights (DeepSeek-V3's format: a tensor, and float32 scales per block of 128 x 128
under its name plus ``_scale_inv``) stay as stored.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from afd.errors import ConfigError
from afd.models import Family, MlpNames, MoeModel
from afd.models.checkpoint import TensorInfo, tensor_table
from afd.wire.layout import SCALE_BLOCK, Tag
from ffn_worker.moe.quantise import Weight, dequantise_weight
from ffn_worker.moe.scheme import Scheme

SCALE_SUFFIX = "_scale_inv"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED_DTYPES = ("BF16", "F16", "F32")
STORED_FP8 = "F8_E4M3"

Table = dict[str, TensorInfo]
Progress = Callable[[int, int, int], None]
"""Called with (layers loaded, number of layers, bytes read so far), by one thread at a time."""


@dataclass(frozen=True)
class Shard:
    """The part of every MoE layer that one rank of an FFN instance holds.

    slots: half-open range of the instance's expert slots (afd/placement/tables.py).
    total_slots: the number of expert slots of all instances.
    experts: by layer number, the routed expert in each slot of the instance.
    width: half-open slice of the routed experts' intermediate dimension.
    shared: half-open slice of the shared experts' intermediate dimension; None if the model has no
        shared expert.
    """

    slots: tuple[int, int]
    total_slots: int
    experts: Mapping[int, tuple[int, ...]]
    width: tuple[int, int]
    shared: tuple[int, int] | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a shard, in the serving dtype or block-scaled FP8; gate rows before up rows.

    w13 [E_local, 2*I, H] and w2 [E_local, H, I], I: the shard's width. shared_gate_up
    [2*Is_local, H] or None, shared_down [H, Is_local] or None. A weight whose slice cuts a block is
    in the serving dtype.
    """

    w13: Weight
    w2: Weight
    shared_gate_up: Weight | None
    shared_down: Weight | None


@dataclass(frozen=True)
class LoadedShard:
    """Weights by global layer number, and the tensor bytes that were read from files."""

    layers: dict[int, LayerWeights]
    bytes_read: int


class _Reader:
    """Reads tensors of one checkpoint on one thread, and counts the bytes read."""

    def __init__(self, table: Table, files: ExitStack) -> None:
        self._table = table
        self._files = files
        self._open: dict[Path, Any] = {}  # safetensors has no types
        self.bytes_read = 0

    def read(self, name: str, *ranges: tuple[int, int]) -> torch.Tensor:
        """Returns the tensor ``name``, cut to ``ranges`` in its leading dimensions."""
        file = self._table[name].file
        if file not in self._open:
            handle = safe_open(str(file), framework="pt", device="cpu")
            self._open[file] = self._files.enter_context(handle)
        if ranges:
            tensor: torch.Tensor = self._open[file].get_slice(name)[
                tuple(slice(*r) for r in ranges)
            ]
        else:
            tensor = self._open[file].get_tensor(name)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def scheme(self, name: str) -> Scheme:
        return _scheme_of(self._table, name)

    def read_into(self, weight: Weight, name: str, *ranges: tuple[int, int]) -> None:
        """Fills ``weight`` from the tensor ``name``, and from its scales if it is FP8.

        If ``weight`` is plain and the tensor FP8, reads all blocks that the slice cuts and decodes
        them.
        """
        if self.scheme(name) is Scheme.PLAIN:
            weight.codes.copy_(self.read(name, *ranges))
            return
        leading = len(self._table[name].shape) - 2  # before the two that blocks divide
        before, cut = ranges[:leading], ranges[leading:]
        blocks = [(a // SCALE_BLOCK, -(-b // SCALE_BLOCK)) for a, b in cut]
        scales = self.read(name + SCALE_SUFFIX, *before, *blocks)
        if weight.scales is not None:
            weight.codes.copy_(self.read(name, *ranges))
            weight.scales.copy_(scales)
            return
        whole = [(a * SCALE_BLOCK, b * SCALE_BLOCK) for a, b in blocks]
        stored = Weight(Tag.E4M3FN, self.read(name, *before, *whole), scales)
        inside = [slice(a - w, b - w) for (a, b), (w, _) in zip(cut, whole, strict=True)]
        wanted = (*[slice(None)] * leading, *inside)
        weight.codes.copy_(dequantise_weight(stored)[wanted])


@contextmanager
def _reader(table: Table) -> Iterator[_Reader]:
    with ExitStack() as files:
        yield _Reader(table, files)


def load_layer(
    path: str | PathLike[str], family: Family, model: MoeModel, shard: Shard, layer: int
) -> LayerWeights:
    """Loads the routed experts that ``shard`` names for one layer; the shared parts are None.

    Raises:
        ConfigError: as :func:`load_shard`.
    """
    table = tensor_table(path)
    routed = _routed_names(family, model, table)
    alone = replace(shard, shared=None)
    _check_layer(table, family, routed, model, alone, layer)
    with _reader(table) as reader:
        return _load_layer(reader, family, routed, model, alone, layer)


def load_shard(
    path: str | PathLike[str],
    family: Family,
    model: MoeModel,
    shard: Shard,
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> LoadedShard:
    """Loads ``shard`` of every MoE layer, several layers at a time. FP8 stays as stored; other
    dtypes are cast to ``model.dtype``.

    Checks all names and shapes against the file headers before it reads any weight.

    Raises:
        ConfigError: a tensor is missing, its shape differs from config.json, or its dtype is not
            supported; the message names the tensor.
    """
    table = tensor_table(path)
    routed = _routed_names(family, model, table)
    for layer in model.moe_layers:
        _check_layer(table, family, routed, model, shard, layer)

    def load(layer: int) -> tuple[LayerWeights, int]:
        with _reader(table) as reader:
            return _load_layer(reader, family, routed, model, shard, layer), reader.bytes_read

    layers: dict[int, LayerWeights] = {}
    total = 0
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="load") as pool:
        loaded = zip(model.moe_layers, pool.map(load, model.moe_layers), strict=True)
        for layer, (weights, nbytes) in loaded:
            layers[layer] = weights
            total += nbytes
            if progress is not None:
                progress(len(layers), len(model.moe_layers), total)
    return LoadedShard(layers, total)


def _routed_names(family: Family, model: MoeModel, table: Table) -> MlpNames:
    """Returns the first of the family's layouts that this checkpoint uses."""
    layer = model.moe_layers[0]
    for names in family.routed_names:
        if names.for_layer(layer, expert=0).down in table:
            return names
    wanted = family.routed_names[0].for_layer(layer, expert=0).down
    raise ConfigError(
        f"the checkpoint has no tensor {wanted}: it is incomplete or not of the family "
        f"{family.name}; download it again, or correct model_type in its config.json"
    )


def stored_scheme(path: str | PathLike[str], family: Family, model: MoeModel) -> Scheme:
    """Returns how a checkpoint stores its routed experts: PLAIN or FP8_BLOCK.

    Raises:
        ConfigError: the checkpoint has no routed experts.
    """
    table = tensor_table(path)
    names = _routed_names(family, model, table)
    return _scheme_of(table, names.for_layer(model.moe_layers[0], expert=0).down)


def _scheme_of(table: Table, name: str) -> Scheme:
    return Scheme.FP8_BLOCK if table[name].dtype == STORED_FP8 else Scheme.PLAIN


def _check_layer(
    table: Table, family: Family, routed: MlpNames, model: MoeModel, shard: Shard, layer: int
) -> None:
    width = model.moe_intermediate
    if routed.per_expert:
        mlps = [routed.for_layer(layer, expert) for expert in shard.experts[layer]]
        leading: tuple[int, ...] = ()
    else:
        mlps, leading = [routed.for_layer(layer)], (model.num_experts,)
    for names in mlps:
        _check_mlp(table, names, model, width, leading)
    _check_alike(table, [name for names in mlps for name in (*names.gate_up, names.down)])
    if shard.shared is not None and family.shared_names is not None:
        names = family.shared_names.for_layer(layer)
        _check_mlp(table, names, model, model.shared_intermediate)
        _check_alike(table, [*names.gate_up, names.down])


def _check_alike(table: Table, names: list[str]) -> None:
    """Raises ConfigError if some of these tensors are FP8 and some are not."""
    for name in names[1:]:
        if _scheme_of(table, name) is not _scheme_of(table, names[0]):
            raise ConfigError(
                f"tensor {name} is stored as {table[name].dtype} and {names[0]} as "
                f"{table[names[0]].dtype}; the experts of a layer must be all FP8 or none"
            )


def _check_mlp(
    table: Table, names: MlpNames, model: MoeModel, width: int, leading: tuple[int, ...] = ()
) -> None:
    rows = 2 * width // len(names.gate_up)
    expected = {name: (*leading, rows, model.hidden) for name in names.gate_up}
    expected[names.down] = (*leading, model.hidden, width)
    for name, shape in expected.items():
        info = table.get(name)
        if info is None:
            raise ConfigError(f"the checkpoint has no tensor {name}; it is incomplete")
        if info.shape != shape:
            raise ConfigError(
                f"tensor {name} in {info.file.name} has shape {list(info.shape)}, config.json "
                f"asks for {list(shape)}; use the config.json that belongs to these weights"
            )
        if info.dtype == STORED_FP8:
            _check_scales(table, name, shape)
        elif info.dtype not in STORED_DTYPES:
            raise ConfigError(
                f"tensor {name} in {info.file.name} is stored as {info.dtype}; use a checkpoint in "
                f"{', '.join(STORED_DTYPES)}, or {STORED_FP8} with scales"
            )


def _check_scales(table: Table, name: str, shape: tuple[int, ...]) -> None:
    """Checks that an FP8 tensor has a scale per block of 128 x 128, and only whole blocks."""
    *leading, n, k = shape
    if n % SCALE_BLOCK or k % SCALE_BLOCK:
        raise ConfigError(
            f"FP8 tensor {name} is {n} x {k}, not a multiple of {SCALE_BLOCK} both ways; use "
            "the bfloat16 checkpoint of the model"
        )
    scales = table.get(name + SCALE_SUFFIX)
    wanted = (*leading, n // SCALE_BLOCK, k // SCALE_BLOCK)
    if scales is None or scales.shape != wanted or scales.dtype != "F32":
        found = "has none" if scales is None else f"has {scales.dtype} {list(scales.shape)}"
        raise ConfigError(
            f"FP8 tensor {name} needs float32 scales {list(wanted)} named {name + SCALE_SUFFIX}, "
            f"the checkpoint {found}; use the bfloat16 checkpoint of the model"
        )


def _load_layer(
    reader: _Reader, family: Family, routed: MlpNames, model: MoeModel, shard: Shard, layer: int
) -> LayerWeights:
    dtype, hidden = DTYPES[model.dtype], model.hidden
    experts, width = shard.experts[layer], shard.width[1] - shard.width[0]
    scheme = _kept_scheme(reader, routed.for_layer(layer, experts[0]).down, shard.width)
    w13 = _empty(scheme, (len(experts), 2 * width, hidden), dtype)
    w2 = _empty(scheme, (len(experts), hidden, width), dtype)
    if routed.per_expert:
        for slot, expert in enumerate(experts):
            names = routed.for_layer(layer, expert)
            for half, (name, rows) in _halves(w13[slot], names, model, shard):
                reader.read_into(half, name, rows)
            reader.read_into(w2[slot], names.down, (0, hidden), shard.width)
    else:
        names = routed.for_layer(layer)
        for first, run in _runs(experts):
            there = slice(first, first + run[1] - run[0])
            for half, (name, rows) in _halves(w13[there], names, model, shard):
                reader.read_into(half, name, run, rows)
            reader.read_into(w2[there], names.down, run, (0, hidden), shard.width)
    if shard.shared is None or family.shared_names is None:
        return LayerWeights(w13, w2, None, None)
    names = family.shared_names.for_layer(layer)
    narrow = shard.shared[1] - shard.shared[0]
    scheme = _kept_scheme(reader, names.down, shard.shared)
    gate_up = _empty(scheme, (2 * narrow, hidden), dtype)
    down = _empty(scheme, (hidden, narrow), dtype)
    for part, name in zip(_parts(gate_up, len(names.gate_up)), names.gate_up, strict=True):
        reader.read_into(part, name, shard.shared)
    reader.read_into(down, names.down, (0, hidden), shard.shared)
    return LayerWeights(w13, w2, gate_up, down)


def _kept_scheme(reader: _Reader, name: str, cut: tuple[int, int]) -> Scheme:
    """Returns the stored scheme if the slice ends between blocks, else PLAIN."""
    whole = all(end % SCALE_BLOCK == 0 for end in cut)
    return reader.scheme(name) if whole else Scheme.PLAIN


def _runs(experts: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yields (first slot, half-open range of experts) of every run of consecutive experts."""
    first = 0
    for slot in range(1, len(experts) + 1):
        if slot == len(experts) or experts[slot] != experts[slot - 1] + 1:
            yield first, (experts[first], experts[slot - 1] + 1)
            first = slot


def _halves(
    gate_up: Weight, names: MlpNames, model: MoeModel, shard: Shard
) -> list[tuple[Weight, tuple[str, tuple[int, int]]]]:
    """Returns the gate and the up half of [..., 2*I, H], each with the tensor and rows to read."""
    start, end = shard.width
    # A checkpoint stores them as two tensors, or as one with the gate rows first.
    shifts = [0, 0] if len(names.gate_up) == 2 else [0, model.moe_intermediate]
    names_of_halves = (names.gate_up[0], names.gate_up[-1])
    rows = [(shift + start, shift + end) for shift in shifts]
    return list(zip(_parts(gate_up, 2), zip(names_of_halves, rows, strict=True), strict=True))


def _empty(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Allocates a weight in the given scheme."""
    if scheme is Scheme.PLAIN:
        return Weight.of(torch.empty(shape, dtype=dtype))
    *leading, n, k = shape
    scales = torch.empty((*leading, n // SCALE_BLOCK, k // SCALE_BLOCK))
    return Weight(Tag.E4M3FN, torch.empty(shape, dtype=torch.float8_e4m3fn), scales)


def _parts(gate_up: Weight, count: int) -> list[Weight]:
    """Splits [..., 2*I, H] into ``count`` views along its rows."""
    codes = gate_up.codes.chunk(count, dim=-2)
    scales = [None] * count if gate_up.scales is None else gate_up.scales.chunk(count, dim=-2)
    return [Weight(gate_up.tag, c, s) for c, s in zip(codes, scales, strict=True)]
