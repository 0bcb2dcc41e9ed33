"""Conversions to and from the small floating-point formats: both e4m3 formats, e5m2, e2m1."""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from emulator.operands import Array, fields_of, read_bits, typed
from emulator.state import Unsupported, Wave

Step = Callable[[Wave], None]
_NARROW = {
    ("FP8", False): (ml_dtypes.float8_e4m3fn, 448.0),
    ("FP8", True): (ml_dtypes.float8_e4m3fnuz, 240.0),
    ("BF8", False): (ml_dtypes.float8_e5m2, 57344.0),
    ("BF8", True): (ml_dtypes.float8_e5m2fnuz, 57344.0),
}
_PAIRS = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}


def small_float(codes: Array, kind: str, fnuz: bool) -> Array:
    """float32 values of "FP8", "BF8" or "FP4" codes (uint8)."""
    if kind == "FP4":
        return (codes & 15).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    return codes.view(_NARROW[kind, fnuz][0]).astype(np.float32)


def to_small(x: Array, kind: str, fnuz: bool, clamps: bool) -> Array:
    """Codes (uint32) of float32 values. Beyond the largest finite number: NaN or infinity, or
    that number when the MODE register says so; FP4 always saturates."""
    if kind == "FP4":
        codes = np.clip(np.nan_to_num(x, nan=6.0), -6, 6).astype(ml_dtypes.float4_e2m1fn)
        return codes.view(np.uint8).astype(np.uint32) & np.uint32(15)
    dtype, largest = _NARROW[kind, fnuz]
    if clamps:
        x = np.where(np.isnan(x), x, np.clip(x, -largest, largest))
    return x.astype(dtype).view(np.uint8).astype(np.uint32)


def conversion(name: str, instruction: Any) -> Step | None:
    """The step of a small-float conversion, None for another instruction."""
    if match := re.fullmatch(r"V_CVT_SCALEF32_PK_(\w+)_(\w+)", name):
        return _scaled(match[1], match[2], fields_of(instruction))
    if match := re.fullmatch(r"V_CVT_PK_(FP8|BF8)_F32", name):
        return _pack(match[1], fields_of(instruction))
    if match := re.fullmatch(r"V_CVT_(PK_)?F32_(FP8|BF8)", name):
        return _unpack(bool(match[1]), match[2], instruction)
    return None


def _pack(kind: str, f: dict[str, int]) -> Step:
    sources = [
        typed(f[f"src{i}"], "f32", negate=bool(f["neg"] >> i & 1), absolute=bool(f["abs"] >> i & 1))
        for i in range(2)
    ]
    return _insert(kind, sources, None, f["vdst"], 16 * (f["opsel"] >> 3 & 1))


def _insert(
    kind: str, sources: list, scale: Callable[[Wave], Array] | None, register: int, shift: int
) -> Step:
    """Two codes side by side into part of a register; its other bits stay."""
    bits = 4 if kind == "FP4" else 8
    keep = np.uint32(~((1 << 2 * bits) - 1 << shift) & 0xFFFFFFFF)

    def step(w: Wave) -> None:
        values = [read(w) for read in sources]
        if scale is not None:
            factor = _power(scale(w), -1)
            values = [(v * factor).astype(np.float32) for v in values]
        low, high = (to_small(v, kind, w.fnuz, w.clamps) for v in values)
        old = w.v[register]
        pair = (low | high << np.uint32(bits)) << np.uint32(shift)
        np.copyto(old, old & keep | pair, where=w.active)

    return step


def _power(scale: Array, sign: int) -> Array:
    """2^(sign * exponent) of the float32 whose bits are ``scale``: only its exponent counts."""
    exponent = (scale >> np.uint32(23) & np.uint32(255)).astype(np.int64) - 127
    return np.ldexp(1.0, sign * exponent)


def _scaled(to: str, source: str, f: dict[str, int]) -> Step:
    opsel, register = f["opsel"], f["vdst"]
    if to in ("FP4", "FP8", "BF8"):
        shift = 8 * (opsel >> 2 & 3) if to == "FP4" else 16 * (opsel >> 3 & 1)
        if source == "F32":
            reads = [typed(f[f"src{i}"], "f32", negate=bool(f["neg"] >> i & 1)) for i in range(2)]
            return _insert(to, reads, read_bits(f["src2"], 0), register, shift)
        bits, dtype = read_bits(f["src0"], 0), _PAIRS[source]
        reads = [
            lambda w, s=s: (
                (bits(w) >> np.uint32(s)).astype(np.uint16).view(dtype).astype(np.float32)
            )
            for s in (0, 16)
        ]
        return _insert(to, reads, read_bits(f["src1"], 0), register, shift)
    if source not in ("FP4", "FP8", "BF8"):
        raise Unsupported(f"V_CVT_SCALEF32_PK_{to}_{source}")
    bits, scale = read_bits(f["src0"], 0), read_bits(f["src1"], 0)
    start, width = (8 * (opsel & 3), 4) if source == "FP4" else (16 * (opsel & 1), 8)

    def step(w: Wave) -> None:
        word, factor = bits(w) >> np.uint32(start), _power(scale(w), 1)
        pair = [
            (small_float((word >> np.uint32(k)).astype(np.uint8), source, w.fnuz) * factor).astype(
                np.float32
            )
            for k in (0, width)
        ]
        _store_pair(w, register, pair, to)

    return step


def _store_pair(w: Wave, register: int, pair: list[Array], to: str) -> None:
    if to == "F32":
        for i in range(2):
            np.copyto(w.v[register + i], pair[i].view(np.uint32), where=w.active)
        return
    low, high = (x.astype(_PAIRS[to]).view(np.uint16).astype(np.uint32) for x in pair)
    np.copyto(w.v[register], low | high << np.uint32(16), where=w.active)


def _unpack(packed: bool, kind: str, instruction: Any) -> Step:
    f, form = fields_of(instruction), type(instruction).__name__
    if "DPP" in form:
        raise Unsupported(f"{instruction.op.name} with DPP")
    if "SDWA" in form:
        code, select = f["vsrc0"] + (0 if f["s0"] else 256), f["src0_sel"]
        shift = {0: 0, 1: 8, 2: 16, 3: 24, 4: 0, 5: 16, 6: 0}[select]
    else:
        code, opsel = f["src0"], f.get("opsel", 0)
        # Byte selection of the VOP3 form: bit 0 is the upper half, bit 1 the odd byte.
        shift = 16 * (opsel & 1) + (0 if packed else 8 * (opsel >> 1 & 1))
    bits, register = read_bits(code, 0), f["vdst"]

    def step(w: Wave) -> None:
        word = bits(w) >> np.uint32(shift)
        if packed:
            pair = [
                small_float((word >> np.uint32(k)).astype(np.uint8), kind, w.fnuz) for k in (0, 8)
            ]
            _store_pair(w, register, pair, "F32")
        else:
            value = small_float(word.astype(np.uint8), kind, w.fnuz)
            np.copyto(w.v[register], value.view(np.uint32), where=w.active)

    return step
