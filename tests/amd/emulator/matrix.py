"""Matrix instructions (V_MFMA_*): one wave multiplies an M x K by a K x N tile.

Operand layouts: CDNA3 ISA, section 7.1.4 "Matrix multiplication"; CDNA4 ISA, same section, and
"scaled matrix operations" for V_MFMA_SCALE. Products are summed in float64 and rounded once; the
hardware's order of additions is not documented, so results are compared within a bound.
"""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from emulator.convert import small_float
from emulator.operands import Array, fields_of, read_bits, read_scalar, scalar_constant
from emulator.state import LANES, Unsupported, Wave

Step = Callable[[Wave], None]
_BITS = {"FP8": 8, "BF8": 8, "FP4": 4, "BF16": 16, "F16": 16, "F32": 32}
_F8F6F4 = {0: "FP8", 1: "BF8", 4: "FP4"}
_NAME = re.compile(r"V_MFMA_(?:SCALE_)?F32_(16|32)X(16|32)X(\d+)_(\w+)")
_SCALE_BLOCK = 32


def _elements(words: Array, kind: str, fnuz: bool) -> Array:
    """float32 [64, per lane] of registers uint32 [n, 64], low bits first."""
    data = np.ascontiguousarray(words.T).view(np.uint8)
    if kind == "FP4":
        nibbles = np.stack([data & 15, data >> 4], axis=-1).reshape(LANES, -1)
        return small_float(nibbles, kind, fnuz)
    if kind in ("FP8", "BF8"):
        return small_float(data, kind, fnuz)
    if kind == "F32":
        return data.view(np.float32)
    return data.view(np.float16 if kind == "F16" else ml_dtypes.bfloat16).astype(np.float32)


def _kinds(suffix: str, f: dict[str, int], name: str) -> tuple[str, str]:
    if suffix == "F8F6F4":
        kinds = _F8F6F4.get(f["cbsz"]), _F8F6F4.get(f["blgp"])
        if None in kinds:
            raise Unsupported(f"{name} with formats {f['cbsz']}, {f['blgp']}")
        return kinds
    if match := re.fullmatch(r"(FP8|BF8)_(FP8|BF8)", suffix):
        return match[1], match[2]
    kind = suffix.removesuffix("_1K")
    if kind not in _BITS:
        raise Unsupported(name)
    return kind, kind


def matrix(instruction: Any) -> Step:
    """One matrix instruction as a function on a wave.

    Raises:
        Unsupported: integer, float64, sparse and multi-block forms.
    """
    name = re.sub(r"_E64$", "", instruction.op.name)
    match = _NAME.fullmatch(name)
    if not match:
        raise Unsupported(name)
    f = fields_of(instruction)
    m, k, suffix = int(match[1]), int(match[3]), match[4]
    kind_a, kind_b = _kinds(suffix, f, name)
    groups = LANES // m  # lanes with the same row hold different k
    per_lane = k // groups
    lane = np.arange(LANES)
    row, group = lane % m, lane // m

    def k_of(kind: str) -> Array:
        """Logical k of element j of each lane: [64, per_lane]."""
        j = np.arange(per_lane)[None, :]
        if suffix == "F8F6F4" and kind in ("FP8", "BF8"):
            half = per_lane // 2  # two runs of 16, K/2 apart
            return j % half + half * group[:, None] + j // half * (k // 2)
        return j + per_lane * group[:, None]

    if suffix != "F8F6F4" and k * m * 2 > 0 and groups * per_lane != k:
        raise Unsupported(name)
    places = {"a": (row[:, None], k_of(kind_a)), "b": (row[:, None], k_of(kind_b))}
    count = m * m // LANES
    i = np.arange(count)
    if m == 16:
        out_row = 4 * group[:, None] + i[None, :]
    else:
        out_row = 8 * (i // 4)[None, :] + 4 * group[:, None] + (i % 4)[None, :]

    def registers(field: str, bit: int, n: int) -> Callable[[Wave], Array]:
        code = f[field]
        if code < 256:
            raise Unsupported(f"{name} with a scalar matrix operand")
        start = code - 256 + (256 if f["acc"] >> bit & 1 else 0)
        return lambda w: w.v[start : start + n]

    read_a = registers("src0", 0, per_lane * _BITS[kind_a] // 32)
    read_b = registers("src1", 1, per_lane * _BITS[kind_b] // 32)
    out = f["vdst"] + (256 if f["acc_cd"] else 0)
    read_c = _addend(f, count)
    scales = _scales(f) if "SCALE" in name else None

    def step(w: Wave) -> None:
        a, b = np.zeros((m, k), np.float64), np.zeros((m, k), np.float64)
        a[places["a"]] = _elements(read_a(w), kind_a, w.fnuz)
        b[places["b"]] = _elements(read_b(w), kind_b, w.fnuz)
        if scales is not None:
            for tile, read in zip((a, b), scales, strict=True):
                code = read(w).reshape(groups, m).T.astype(np.int64)
                # 255 is NaN (OCP Microscaling 1.0, section 5.4.1); the CDNA4 document is silent.
                scale = np.where(code == 255, np.nan, np.ldexp(1.0, code - 127))
                tile *= scale.repeat(_SCALE_BLOCK, axis=1)
        product = a @ b.T
        total = product[out_row, row[:, None]] + read_c(w).T
        w.v[out : out + count] = total.astype(np.float32).T.view(np.uint32)

    return step


def _addend(f: dict[str, int], count: int) -> Callable[[Wave], Array]:
    code = f["src2"]
    if code >= 256:
        start = code - 256 + (256 if f["acc_cd"] else 0)
        return lambda w: w.v[start : start + count].view(np.float32).astype(np.float64)
    if scalar_constant(code, 0) is None:
        raise Unsupported("matrix addend in scalar registers")
    value = np.array([read_scalar(code, 0)(None)], np.uint32).view(np.float32)[0]
    return lambda w: np.full((count, LANES), value, np.float64)


def _scales(f: dict[str, int]) -> list[Callable[[Wave], Array]]:
    """E8M0 scales of A and B, one byte per lane: uint32 [64]."""

    def byte_of(i: int) -> Callable[[Wave], Array]:
        bits = read_bits(f[f"scale_src{i}"], 0)
        shift = np.uint32(8 * (f["opsel"] >> i & 1 | (f["opsel_hi"] >> i & 1) << 1))
        return lambda w: bits(w) >> shift & np.uint32(255)

    return [byte_of(0), byte_of(1)]
