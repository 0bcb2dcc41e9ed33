"""How checkpoints store the weight of one linear layer. Plain facts; no torch.

A linear layer computes x @ W.T with W [N, K]. Every number is given for one layer; experts that are
stacked in one tensor have a leading dimension more. :mod:`afd.models.quantization` reads which
format a checkpoint uses.

Sources: vLLM 0.26, ``model_executor/layers/quantization`` (``create_weights`` of fp8.py,
modelopt.py, auto_awq.py, auto_gptq.py, compressed_tensors/schemes, quark/schemes), ``models/
gpt_oss.py`` (``_load_weights_mxfp4``), and the tensors of the published checkpoints named below.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

FP8_BLOCK_SIZE = 128
"""Rows and columns that share a scale in Layout.FP8_BLOCK; no other size is supported."""
MX_GROUP = 32
"""Columns that share a scale in Layout.MXFP4 (OCP Microscaling Formats 1.0)."""
INT4_PER_WORD = 8
"""Values in one int32 of the INT4 layouts."""

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of weights that are not quantised, and of scales."""


class Layout(Enum):
    """Number format and arrangement of one weight.

    FP8_BLOCK: e4m3, one scale per 128 x 128 (DeepSeek-V3, Kimi-K2-Instruct, Qwen3-235B-A22B-FP8).
    FP8_CHANNEL: e4m3, one scale per row (GLM-4.6-FP8).
    FP8_TENSOR: e4m3, one scale (ModelOpt's FP8).
    MXFP4: e2m1, two in a byte, even columns low; one power of two per 32 columns (gpt-oss, Quark).
    INT4: eight in an int32, first column lowest, offset 8, along K; one float scale per group of
        columns (Kimi-K2-Thinking).
    GPTQ: eight in an int32 along K, transposed: [K/8, N]; zero points along N.
    AWQ: eight in an int32 along N, transposed and interleaved: [K, N/8].
    """

    PLAIN = "plain"
    FP8_BLOCK = "fp8_block"
    FP8_CHANNEL = "fp8_channel"
    FP8_TENSOR = "fp8_tensor"
    MXFP4 = "mxfp4"
    INT4 = "int4"
    GPTQ = "gptq"
    AWQ = "awq"


@dataclass(frozen=True)
class Part:
    """One tensor of a weight. dtypes: as safetensors headers name them, all that are in use.

    shapes: those in use; they differ by dimensions of size 1 only.
    """

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


Range = tuple[int, int]
"""Half open."""


@dataclass(frozen=True)
class Cut:
    """What has to be read for a slice of a weight.

    rows, columns: the slice, widened to whole blocks, groups and words. ranges: by the last part of
    the tensor's name, the range in each dimension of ``Part.shapes[0]``.
    """

    rows: Range
    columns: Range
    ranges: Mapping[str, tuple[Range, ...]]


@dataclass(frozen=True)
class WeightFormat:
    """How one weight is stored, and what its tensors are called.

    codes, scales, zeros, order: last parts of the tensors' names; "": there is no such tensor.
        ``scales`` of ``weight_scale`` is the tensor ``MODULE.weight_scale``. A stacked parameter,
        whose name has no ``.weight``, takes them after an underscore (:func:`tensor_name`).
    group: columns that share a scale, INT4 layouts only; 0: all.
    symmetric: zero points are 8 in the middle of the range; ``zeros`` may exist but says the same.
    zero_offset: added to stored zero points (GPTQ's first format stores them minus one).
    """

    layout: Layout = Layout.PLAIN
    codes: str = "weight"
    scales: str = ""
    zeros: str = ""
    order: str = ""
    group: int = 0
    symmetric: bool = True
    zero_offset: int = 0

    @property
    def is_quantised(self) -> bool:
        return self.layout is not Layout.PLAIN

    def parts(self, n: int, k: int) -> dict[str, Part]:
        """Returns the tensors that a weight [n, k] consists of, by the last part of their name.

        Tensors that carry no value of their own (``weight_shape``, input scales) are left out.
        """
        groups = -(-k // self.group) if self.group else 1
        order = {self.order: Part(("I32",), ((k,),))} if self.order else {}
        match self.layout:
            case Layout.PLAIN:
                return {self.codes: Part(FLOATS, ((n, k),))}
            case Layout.FP8_BLOCK:
                blocks = -(-n // FP8_BLOCK_SIZE), -(-k // FP8_BLOCK_SIZE)
                shapes = blocks, (blocks[0], 1, blocks[1], 1)
                scales = Part(FLOATS, shapes)
            case Layout.FP8_CHANNEL:
                scales = Part(FLOATS, ((n, 1), (n,)))
            case Layout.FP8_TENSOR:
                scales = Part(FLOATS, ((), (1,), (1, 1)))
            case Layout.MXFP4:
                shape = n, k // MX_GROUP
                codes = Part(("U8",), ((n, k // 2), (*shape, MX_GROUP // 2)))
                return {self.codes: codes, self.scales: Part(("U8", "F8_E8M0"), (shape,))}
            case Layout.INT4:
                parts = {
                    self.codes: Part(("I32",), ((n, k // INT4_PER_WORD),)),
                    self.scales: Part(FLOATS, ((n, groups),)),
                }
                if self.zeros:
                    parts[self.zeros] = Part(("I32",), ((n // INT4_PER_WORD, groups),))
                return parts | order
            case Layout.GPTQ | Layout.AWQ:
                packed = (k, n // INT4_PER_WORD)
                if self.layout is Layout.GPTQ:
                    packed = (k // INT4_PER_WORD, n)
                return {
                    self.codes: Part(("I32",), (packed,)),
                    self.scales: Part(FLOATS, ((groups, n),)),
                    self.zeros: Part(("I32",), ((groups, n // INT4_PER_WORD),)),
                    **order,
                }
        return {self.codes: Part(("F8_E4M3",), ((n, k),)), self.scales: scales}

    def size(self, codes: tuple[int, ...]) -> tuple[int, int]:
        """Returns (n, k) of a weight whose tensor of codes has this shape."""
        first, second = codes[0], prod(codes[1:])
        match self.layout:
            case Layout.MXFP4:
                return first, 2 * second
            case Layout.INT4:
                return first, INT4_PER_WORD * second
            case Layout.GPTQ:
                return second, INT4_PER_WORD * first
            case Layout.AWQ:
                return INT4_PER_WORD * second, first
        return first, second

    def cut(self, rows: Range, columns: Range, n: int, k: int) -> Cut:
        """Returns what to read for W[rows, columns] of a weight [n, k].

        Scales and codes are cut at the same values. Where the slice ends inside a block, a group
        or a word, the cut is wider than the slice.
        """
        row_unit, column_unit = self._units()
        rows, columns = _widened(rows, row_unit, n), _widened(columns, column_unit, k)
        words = _per(rows, INT4_PER_WORD)
        groups = _per(columns, self.group) if self.group else (0, 1)
        if self.order:
            groups = (0, -(-k // self.group) if self.group else 1)  # any column has any group
        ranges: dict[str, tuple[Range, ...]]
        match self.layout:
            case Layout.FP8_BLOCK:
                scales = _per(rows, FP8_BLOCK_SIZE), _per(columns, FP8_BLOCK_SIZE)
                ranges = {self.codes: (rows, columns), self.scales: scales}
            case Layout.FP8_CHANNEL:
                ranges = {self.codes: (rows, columns), self.scales: (rows, (0, 1))}
            case Layout.FP8_TENSOR:
                ranges = {self.codes: (rows, columns), self.scales: ()}
            case Layout.MXFP4:
                ranges = {self.codes: (rows, _per(columns, 2)), self.scales: (rows, groups)}
            case Layout.INT4:
                codes = rows, _per(columns, INT4_PER_WORD)
                ranges = {self.codes: codes, self.scales: (rows, groups)}
                if self.zeros:
                    ranges[self.zeros] = (words, groups)
            case Layout.GPTQ:
                codes = _per(columns, INT4_PER_WORD), rows
                ranges = {self.codes: codes, self.scales: (groups, rows)}
                ranges[self.zeros] = (groups, words)
            case Layout.AWQ:
                ranges = {self.codes: (columns, words), self.scales: (groups, rows)}
                ranges[self.zeros] = (groups, words)
            case _:
                ranges = {self.codes: (rows, columns)}
        if self.order:
            ranges[self.order] = (columns,)
        return Cut(rows, columns, ranges)

    def _units(self) -> tuple[int, int]:
        """Returns the rows and columns between which a slice can end without being widened."""
        match self.layout:
            case Layout.FP8_BLOCK:
                return FP8_BLOCK_SIZE, FP8_BLOCK_SIZE
            case Layout.MXFP4:
                return 1, MX_GROUP
            case Layout.INT4 | Layout.GPTQ:
                group = 0 if self.order else self.group
                return (INT4_PER_WORD if self.zeros else 1), group or INT4_PER_WORD
            case Layout.AWQ:
                return INT4_PER_WORD, self.group or 1
        return 1, 1

    def __str__(self) -> str:
        per = f" of {self.group} columns" if self.group else ""
        return f"{self.layout.value}{per}"


PLAIN = WeightFormat()


def _widened(cut: Range, unit: int, size: int) -> Range:
    return cut[0] // unit * unit, min(-(-cut[1] // unit) * unit, size)


def _per(cut: Range, unit: int) -> Range:
    return cut[0] // unit, -(-cut[1] // unit)


SUFFIXES = (
    "weight",
    "bias",
    "weight_scale_inv",
    "weight_scale",
    "input_scale",
    "weight_packed",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
    "blocks",
)
"""Last parts of the names of all tensors that belong to one weight, in any format."""


def tensor_name(weight: str, suffix: str) -> str:
    """Returns the name of one tensor of a weight.

    Args:
        weight: the name that the tensor has in an unquantised checkpoint: ``MODULE.weight``, or
            that of a stacked parameter such as ``experts.gate_up_proj``.
        suffix: an element of SUFFIXES.
    """
    module = weight.removesuffix(".weight")
    if module != weight:
        return f"{module}.{suffix}"
    return weight if suffix == "weight" else f"{weight}_{suffix}"


def weight_names(tensor: str) -> tuple[str, ...]:
    """Returns the weights that a tensor may belong to: the inverse of :func:`tensor_name`."""
    names = [tensor]
    for suffix in SUFFIXES:
        if tensor.endswith(f".{suffix}"):
            names.append(tensor.removesuffix(f".{suffix}") + ".weight")
        elif tensor.endswith(f"_{suffix}"):
            names.append(tensor.removesuffix(f"_{suffix}"))
    return tuple(names)
