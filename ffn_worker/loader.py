"""Reads one FFN instance's share of the expert weights, and nothing else, from safetensors."""

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

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
STORED_DTYPES = ("BF16", "F16", "F32")

Table = dict[str, TensorInfo]
Progress = Callable[[int, int, int], None]
"""Called as (layers loaded, layers in all, bytes read so far), from one thread at a time."""


@dataclass(frozen=True)
class Shard:
    """What one rank of an FFN instance holds of every MoE layer, as half-open ranges.

    experts: global ids of routed experts. width: slice of their intermediate dimension. shared:
    slice of the shared experts' intermediate dimension, None where the model has no shared expert.
    """

    experts: tuple[int, int]
    width: tuple[int, int]
    shared: tuple[int, int] | None


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a shard in the serving dtype; gate rows come before up rows.

    w13 [E_local, 2*I, H], w2 [E_local, H, I] with I the shard's width, shared_gate_up
    [2*Is_local, H] or None, shared_down [H, Is_local] or None.
    """

    w13: torch.Tensor
    w2: torch.Tensor
    shared_gate_up: torch.Tensor | None
    shared_down: torch.Tensor | None


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
    """Loads `shard` of every MoE layer, cast to `model.dtype`, several layers at a time.

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


def _check_layer(
    table: Table, family: Family, routed: MlpNames, model: MoeModel, shard: Shard, layer: int
) -> None:
    if routed.per_expert:
        for expert in range(*shard.experts):
            _check_mlp(table, routed.for_layer(layer, expert), model, model.moe_intermediate)
    else:
        leading = (model.num_experts,)
        _check_mlp(table, routed.for_layer(layer), model, model.moe_intermediate, leading)
    if shard.shared is not None and family.shared_names is not None:
        names = family.shared_names.for_layer(layer)
        _check_mlp(table, names, model, model.shared_intermediate)


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
        if info.dtype not in STORED_DTYPES:
            raise ConfigError(
                f"tensor {name} in {info.file.name} is stored as {info.dtype}; FFN instances read "
                f"{', '.join(STORED_DTYPES)}"
            )


def _load_layer(
    reader: _Reader, family: Family, routed: MlpNames, model: MoeModel, shard: Shard, layer: int
) -> LayerWeights:
    dtype, hidden = DTYPES[model.dtype], model.hidden
    (start, end), width = shard.experts, shard.width[1] - shard.width[0]
    w13 = torch.empty((end - start, 2 * width, hidden), dtype=dtype)
    w2 = torch.empty((end - start, hidden, width), dtype=dtype)
    if routed.per_expert:
        for expert in range(start, end):
            names = routed.for_layer(layer, expert)
            for half, (name, rows) in zip(
                *_halves(w13[expert - start], names, model, shard), strict=True
            ):
                half.copy_(reader.read(name, rows))
            w2[expert - start].copy_(reader.read(names.down, (0, hidden), shard.width))
    else:
        names = routed.for_layer(layer)
        for half, (name, rows) in zip(*_halves(w13, names, model, shard), strict=True):
            half.copy_(reader.read(name, shard.experts, rows))
        w2.copy_(reader.read(names.down, shard.experts, (0, hidden), shard.width))
    if shard.shared is None or family.shared_names is None:
        return LayerWeights(w13, w2, None, None)
    names = family.shared_names.for_layer(layer)
    gate_up = torch.cat([reader.read(name, shard.shared) for name in names.gate_up])
    down = reader.read(names.down, (0, hidden), shard.shared)
    return LayerWeights(w13, w2, gate_up.to(dtype), down.to(dtype).contiguous())


def _halves(
    gate_up: torch.Tensor, names: MlpNames, model: MoeModel, shard: Shard
) -> tuple[tuple[torch.Tensor, ...], list[tuple[str, tuple[int, int]]]]:
    """The gate and the up half of [..., 2*I, H], and for each the tensor and its rows to read."""
    start, end = shard.width
    # A checkpoint stores them as two tensors, or as one with the gate rows first.
    shifts = [0, 0] if len(names.gate_up) == 2 else [0, model.moe_intermediate]
    names_of_halves = (names.gate_up[0], names.gate_up[-1])
    rows = [(shift + start, shift + end) for shift in shifts]
    return gate_up.chunk(2, dim=-2), list(zip(names_of_halves, rows, strict=True))
