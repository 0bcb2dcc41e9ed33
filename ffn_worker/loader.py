"""Reads one FFN instance's share of the expert weights, and nothing else, from safetensors.

FP8 weights by blocks of 128 x 128 (DeepSeek-V3's format: a tensor and, under its name and
``_scale_inv``, float32 scales) stay as they are stored.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import torch
from safetensors import safe_open

from afd.checkpoint import TensorInfo, tensor_table
from afd.errors import ConfigError
from afd.models import Family, MlpNames, MoeModel
from afd.models.family import SCALE_SUFFIX
from afd.wire.layout import SCALE_BLOCK, Tag
from ffn_worker.moe.quantise import Scheme, Weight, dequantise_weight

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED_DTYPES = ("BF16", "F16", "F32")
STORED_FP8 = "F8_E4M3"

Table = dict[str, TensorInfo]
Progress = Callable[[int, int, int], None]
"""Called as (layers loaded, layers in all, bytes read so far), from one thread at a time."""


@dataclass(frozen=True)
class Shard:
    """What one FFN instance holds of every MoE layer, as half-open ranges.

    experts: global ids of routed experts. shared: slice of the shared experts' intermediate
    dimension, None where the model has no shared expert.
    """

    experts: tuple[int, int]
    shared: tuple[int, int] | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a shard, in the serving dtype or in FP8 by blocks; gate rows before up rows.

    w13 [E_local, 2*I, H], w2 [E_local, H, I], shared_gate_up [2*Is_local, H] or None,
    shared_down [H, Is_local] or None; the shared ones are plain where their slice cuts a block.
    """

    w13: Weight
    w2: Weight
    shared_gate_up: Weight | None
    shared_down: Weight | None


@dataclass(frozen=True)
class LoadedShard:
    """Weights by global layer number, and the tensor bytes that were read from files for them."""

    layers: dict[int, LayerWeights]
    bytes_read: int


class _Reader:
    """Tensors of one checkpoint, read by one thread; counts the bytes it copied out of files."""

    def __init__(self, table: Table, files: ExitStack) -> None:
        self._table = table
        self._files = files
        self._open: dict[Path, safe_open] = {}
        self.bytes_read = 0

    def read(self, name: str, *ranges: tuple[int, int]) -> torch.Tensor:
        """The tensor `name`, cut to `ranges` in its leading dimensions."""
        file = self._table[name].file
        if file not in self._open:
            handle = safe_open(str(file), framework="pt", device="cpu")
            self._open[file] = self._files.enter_context(handle)
        if ranges:
            tensor = self._open[file].get_slice(name)[tuple(slice(*r) for r in ranges)]
        else:
            tensor = self._open[file].get_tensor(name)
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def scheme(self, name: str) -> Scheme:
        return _scheme_of(self._table, name)

    def read_into(self, weight: Weight, name: str, *ranges: tuple[int, int]) -> None:
        """Fill ``weight`` from the tensor ``name``, and from its scales where it is FP8.

        FP8 that is wanted plain is read with all the blocks that the slice cuts.
        """
        if self.scheme(name) is Scheme.PLAIN:
            weight.codes.copy_(self.read(name, *ranges))
            return
        leading = len(self._table[name].shape) - 2  # before the two that blocks are of
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
        everything = [slice(None)] * leading
        weight.codes.copy_(dequantise_weight(stored)[(*everything, *inside)])


@contextmanager
def _reader(table: Table) -> Iterator[_Reader]:
    with ExitStack() as files:
        yield _Reader(table, files)


def load_shard(
    path: str | PathLike[str],
    family: Family,
    model: MoeModel,
    shard: Shard,
    *,
    threads: int = 4,
    progress: Progress | None = None,
) -> LoadedShard:
    """Loads `shard` of every MoE layer, several layers at a time: FP8 as it is, others cast to
    `model.dtype`.

    All names and shapes are checked against the file headers before any weight is read.

    Raises:
        ConfigError: a tensor is missing, has another shape than config.json says, or is stored in
            a dtype that is not read; the message names it.
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
    """The first of the family's layouts that this checkpoint uses."""
    layer = model.moe_layers[0]
    for names in family.routed_names:
        if names.for_layer(layer, expert=0).down in table:
            return names
    wanted = family.routed_names[0].for_layer(layer, expert=0).down
    raise ConfigError(
        f"the checkpoint has no tensor {wanted}; it is incomplete or not of the family "
        f"{family.name}"
    )


def stored_scheme(path: str | PathLike[str], family: Family, model: MoeModel) -> Scheme:
    """How a checkpoint stores its routed experts: PLAIN or FP8_BLOCK.

    Raises:
        ConfigError: it has none, as :func:`load_shard` says.
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
        mlps = [(routed.for_layer(layer, expert), ()) for expert in range(*shard.experts)]
    else:
        mlps = [(routed.for_layer(layer), (model.num_experts,))]
    for names, leading in mlps:
        _check_mlp(table, names, model, width, leading)
    _check_alike(table, [name for names, _ in mlps for name in (*names.gate_up, names.down)])
    if shard.shared is not None and family.shared_names is not None:
        names = family.shared_names.for_layer(layer)
        _check_mlp(table, names, model, model.shared_intermediate)
        _check_alike(table, [*names.gate_up, names.down])


def _check_alike(table: Table, names: list[str]) -> None:
    """One layer's experts are all FP8, or none is."""
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
                f"asks for {list(shape)}; config.json and weights are of different models"
            )
        if info.dtype == STORED_FP8:
            _check_scales(table, name, shape)
        elif info.dtype not in STORED_DTYPES:
            raise ConfigError(
                f"tensor {name} in {info.file.name} is stored as {info.dtype}; FFN instances read "
                f"{', '.join(STORED_DTYPES)}, and {STORED_FP8} with scales"
            )


def _check_scales(table: Table, name: str, shape: tuple[int, ...]) -> None:
    """Scales of an FP8 tensor: one per whole block of 128 x 128."""
    *leading, n, k = shape
    if n % SCALE_BLOCK or k % SCALE_BLOCK:
        raise ConfigError(
            f"tensor {name} is FP8 of {n} x {k}, which blocks of {SCALE_BLOCK} do not divide; use "
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
    dtype, hidden, width = DTYPES[model.dtype], model.hidden, model.moe_intermediate
    start, end = shard.experts
    scheme = reader.scheme(routed.for_layer(layer, start).down)
    w13 = _empty(scheme, (end - start, 2 * width, hidden), dtype)
    w2 = _empty(scheme, (end - start, hidden, width), dtype)
    if routed.per_expert:
        for expert in range(start, end):
            names = routed.for_layer(layer, expert)
            for part, name in zip(_parts(w13[expert - start], names), names.gate_up, strict=True):
                reader.read_into(part, name)
            reader.read_into(w2[expert - start], names.down)
    else:
        names = routed.for_layer(layer)
        for part, name in zip(_parts(w13, names), names.gate_up, strict=True):
            reader.read_into(part, name, shard.experts)
        reader.read_into(w2, names.down, shard.experts)
    if shard.shared is None or family.shared_names is None:
        return LayerWeights(w13, w2, None, None)
    names = family.shared_names.for_layer(layer)
    narrow = shard.shared[1] - shard.shared[0]
    whole = all(end % SCALE_BLOCK == 0 for end in shard.shared)
    scheme = reader.scheme(names.down) if whole else Scheme.PLAIN
    gate_up = _empty(scheme, (2 * narrow, hidden), dtype)
    down = _empty(scheme, (hidden, narrow), dtype)
    for part, name in zip(_parts(gate_up, names), names.gate_up, strict=True):
        reader.read_into(part, name, shard.shared)
    reader.read_into(down, names.down, (0, hidden), shard.shared)
    return LayerWeights(w13, w2, gate_up, down)


def _empty(scheme: Scheme, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Memory for a weight as it is stored."""
    if scheme is Scheme.PLAIN:
        return Weight.of(torch.empty(shape, dtype=dtype))
    *leading, n, k = shape
    scales = torch.empty((*leading, n // SCALE_BLOCK, k // SCALE_BLOCK))
    return Weight(Tag.E4M3FN, torch.empty(shape, dtype=torch.float8_e4m3fn), scales)


def _parts(gate_up: Weight, names: MlpNames) -> list[Weight]:
    """Views of [..., 2*I, H], one for each tensor that the checkpoint stores it as."""
    count = len(names.gate_up)
    codes = gate_up.codes.chunk(count, dim=-2)
    scales = [None] * count if gate_up.scales is None else gate_up.scales.chunk(count, dim=-2)
    return [Weight(gate_up.tag, c, s) for c, s in zip(codes, scales, strict=True)]
