"""Semantics of vector instructions on arrays of 64 lanes, as a table: name -> types, function."""

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray
TYPES = {
    "u16": np.uint16, "i16": np.int16, "f16": np.float16,
    "u32": np.uint32, "i32": np.int32, "f32": np.float32,
    "u64": np.uint64, "i64": np.int64, "f64": np.float64,
}  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """``function`` takes one array per entry of ``sources`` and returns one of type ``result``.

    keeps_high: a 16-bit result leaves the upper half of the register as it is.
    """

    result: str
    sources: tuple[str, ...]
    function: Callable[..., Array]
    keeps_high: bool = False


def fma64(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 values, in float64, rounded to odd.

    The product is exact in float64. A sum rounded to odd there can be rounded once more, to
    float32, with the result of a single rounding (Boldo and Melquiond, 2008).
    """
    p, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = np.asarray(p + c)
    back = total - p
    error = (p - (total - back)) + (c - back)
    bits = total.view(np.int64)
    inexact = (error != 0) & np.isfinite(total) & (bits & 1 == 0)
    away = (error > 0) == (total > 0)
    return np.where(inexact, bits + np.where(away, 1, -1), bits).view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """float32 a * b + c with one rounding."""
    return fma64(a, b, c).astype(np.float32)


def div_fmas32(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """The last step of a quotient, V_DIV_SCALE undone in the lanes that ``scaled`` marks.

    The CDNA documents write 2^32 for the factor, which cannot undo a scaling by 2^64 or 2^-64;
    this is the rule of the RDNA3 document.
    """
    factor = np.where(exponent32(c) > 127, 2.0**64, 2.0**-64)
    return (fma64(a, b, c) * np.where(scaled, factor, 1.0)).astype(np.float32)


def exponent32(x: Array) -> Array:
    """Biased exponent field of float32."""
    return (x.view(np.uint32) >> np.uint32(23) & np.uint32(255)).astype(np.int32)


def div_fixup32(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """The quotient's special cases. A NaN that the operands do not explain is an overflow in the
    steps before: infinity."""
    negative = np.signbit(denominator) ^ np.signbit(numerator)
    sign = np.where(negative, np.float32(-1), np.float32(1))
    out = np.where(np.isnan(quotient), np.float32(np.inf), np.abs(quotient)) * sign
    gap = exponent32(numerator) - exponent32(denominator)
    out = np.where(gap < -150, np.float32(0) * sign, out)
    zero = (numerator == 0) | np.isinf(denominator)
    out = np.where(zero, np.float32(0) * sign, out)
    infinite = (denominator == 0) | np.isinf(numerator)
    out = np.where(infinite, np.float32(np.inf) * sign, out)
    undefined = (zero & infinite) | np.isnan(numerator) | np.isnan(denominator)
    return np.where(undefined, np.float32(np.nan), out).astype(np.float32)


def div_scale32(value: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """(scaled value, lanes whose quotient V_DIV_FMAS must scale back).

    The documents also have a case "1 / denominator is a float64 denormal", which no float32 meets.
    """
    gap = exponent32(numerator) - exponent32(denominator)
    quotient = np.abs(numerator.astype(np.float64) / denominator.astype(np.float64))
    small_quotient = (quotient < 2.0**-126) & (quotient > 0)
    denormal = (exponent32(denominator) == 0) & (denominator != 0)
    up = np.ldexp(value, 64)
    cases = [
        (gap >= 96, np.where(value == denominator, up, value), True),
        (denormal, up, False),
        (small_quotient, np.where(value == numerator, up, value), True),
        (exponent32(numerator) <= 23, up, False),
    ]
    out = np.select([c for c, _, _ in cases], [r for _, r, _ in cases], value)
    flag = np.select([c for c, _, _ in cases], [np.full(64, f) for _, _, f in cases], False)
    undefined = (denominator == 0) | (numerator == 0)
    return np.where(undefined, np.float32(np.nan), out).astype(np.float32), flag & ~undefined


def _med3(a: Array, b: Array, c: Array) -> Array:
    return np.maximum(np.minimum(a, b), np.minimum(np.maximum(a, b), c))


def _med3_float(a: Array, b: Array, c: Array) -> Array:
    least = np.fmin(np.fmin(a, b), c)
    return np.where(np.isnan(a) | np.isnan(b) | np.isnan(c), least, _med3(a, b, c))


def _permute_bytes(a: Array, b: Array, selectors: Array) -> Array:
    # By selector: the bytes of b, then of a, the signs of every second one, 0, and 255.
    table = np.empty((len(a), 14), np.uint8)
    table[:, :8] = np.stack([b, a], -1).view(np.uint8)
    table[:, 8:12] = table[:, 1:8:2].view(np.int8) >> 7
    table[:, 12:] = 0, 255
    selector = np.minimum(np.ascontiguousarray(selectors)[:, None].view(np.uint8), 13)
    return np.take_along_axis(table, selector, 1).view(np.uint32)[:, 0]


def _to_int(x: Array, low: int, high: int) -> Array:
    return np.clip(np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0), low, high)


def _bit_reverse(x: Array) -> Array:
    bits = np.unpackbits(x.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little")
    return np.packbits(bits[:, ::-1], axis=1, bitorder="little").view(np.uint32)[:, 0]


def _bf16(x: Array) -> Array:
    """bfloat16 bits (uint32) of float32 values, to nearest even, NaN stays NaN."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), bits >> np.uint64(16) | np.uint64(0x40), rounded).astype(np.uint32)


def _half_bits(x: Array) -> Array:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def _shift(operator: Callable[[Array, Array], Array], bits: int) -> Callable[[Array, Array], Array]:
    """A "reversed" shift: the first operand says by how much."""
    return lambda n, x: operator(x, (n.astype(x.dtype) & x.dtype.type(bits - 1)))


def _bfe(x: Array, offset: Array, width: Array) -> Array:
    mask = (np.uint64(1) << (width & np.uint32(31)).astype(np.uint64)) - np.uint64(1)
    return ((x >> (offset & np.uint32(31))).astype(np.uint64) & mask).astype(np.uint32)


def _bfe_signed(x: Array, offset: Array, width: Array) -> Array:
    width = (width & np.uint32(31)).astype(np.int64)
    field = x.astype(np.int64) >> (offset & np.uint32(31)).astype(np.int64)
    field &= (np.int64(1) << width) - 1
    sign = np.where(width > 0, np.int64(1) << np.maximum(width - 1, 0), 0)
    return ((field ^ sign) - sign).astype(np.int32)


def _mul_high(a: Array, b: Array, wide: type) -> Array:
    return ((a.astype(wide) * b.astype(wide)) >> wide(32)).astype(a.dtype)


OPERATIONS: dict[str, Operation] = {}


def _add(names: str, result: str, sources: str, function: Callable[..., Array], **kw: bool) -> None:
    for name in names.split():
        OPERATIONS[name] = Operation(result, tuple(sources.split()), function, **kw)


for _t in ("f32", "f16", "u32", "i32", "u16", "i16"):
    _T = _t.upper()
    _two = f"{_t} {_t}"
    _low, _high = (np.fmin, np.fmax) if _t[0] == "f" else (np.minimum, np.maximum)
    _add(f"V_ADD_{_T} V_ADD_NC_{_T}", _t, _two, np.add)
    _add(f"V_SUB_{_T}", _t, _two, np.subtract)
    _add(f"V_SUBREV_{_T}", _t, _two, lambda a, b: b - a)
    _add(f"V_MAX_{_T}", _t, _two, _high)
    _add(f"V_MIN_{_T}", _t, _two, _low)
    _add(f"V_MAX3_{_T}", _t, f"{_two} {_t}", lambda a, b, c, f=_high: f(f(a, b), c))
    _add(f"V_MIN3_{_T}", _t, f"{_two} {_t}", lambda a, b, c, f=_low: f(f(a, b), c))
    _add(f"V_MED3_{_T}", _t, f"{_two} {_t}", _med3_float if _t[0] == "f" else _med3)
_add("V_MINIMUM3_F32", "f32", "f32 f32 f32", lambda a, b, c: np.minimum(np.minimum(a, b), c))
_add("V_MAXIMUM3_F32", "f32", "f32 f32 f32", lambda a, b, c: np.maximum(np.maximum(a, b), c))
for _t in ("f32", "f16"):
    _add(f"V_MUL_{_t.upper()}", _t, f"{_t} {_t}", np.multiply)
    _exact = lambda f, t=TYPES[_t]: lambda x: f(x.astype(np.float64)).astype(t)  # noqa: E731
    _add(f"V_RCP_{_t.upper()} V_RCP_IFLAG_{_t.upper()}", _t, _t, _exact(lambda x: 1 / x))
    _add(f"V_RSQ_{_t.upper()}", _t, _t, _exact(lambda x: 1 / np.sqrt(x)))
    _add(f"V_SQRT_{_t.upper()}", _t, _t, _exact(np.sqrt))
    _add(f"V_EXP_{_t.upper()}", _t, _t, _exact(np.exp2))
    _add(f"V_LOG_{_t.upper()}", _t, _t, _exact(np.log2))
    _add(f"V_RNDNE_{_t.upper()}", _t, _t, np.rint)
    _add(f"V_FLOOR_{_t.upper()}", _t, _t, np.floor)
    _add(f"V_TRUNC_{_t.upper()}", _t, _t, np.trunc)
    _add(
        f"V_LDEXP_{_t.upper()}", _t, f"{_t} i32", lambda x, e, t=TYPES[_t]: np.ldexp(x, e).astype(t)
    )
_add("V_FMA_F32", "f32", "f32 f32 f32", fma32)
_add(
    "V_FMA_F16",
    "f16",
    "f16 f16 f16",
    lambda a, b, c: fma32(*(x.astype(np.float32) for x in (a, b, c))).astype(np.float16),
)
_add("V_DIV_FIXUP_F32", "f32", "f32 f32 f32", div_fixup32)
_add(
    "V_MOV_B32 V_ACCVGPR_READ V_ACCVGPR_WRITE V_ACCVGPR_READ_B32 V_ACCVGPR_WRITE_B32",
    "u32",
    "u32",
    lambda x: x,
)
_add("V_MOV_B64", "u64", "u64", lambda x: x)
_add("V_NOT_B32", "u32", "u32", np.invert)
_add("V_BFREV_B32", "u32", "u32", _bit_reverse)
_add("V_AND_B32", "u32", "u32 u32", np.bitwise_and)
_add("V_OR_B32", "u32", "u32 u32", np.bitwise_or)
_add("V_XOR_B32", "u32", "u32 u32", np.bitwise_xor)
_add("V_XNOR_B32", "u32", "u32 u32", lambda a, b: ~(a ^ b))
_add("V_LSHLREV_B32", "u32", "u32 u32", _shift(np.left_shift, 32))
_add("V_LSHRREV_B32", "u32", "u32 u32", _shift(np.right_shift, 32))
_add("V_ASHRREV_I32", "i32", "u32 i32", _shift(np.right_shift, 32))
_add("V_LSHLREV_B16", "u16", "u16 u16", _shift(np.left_shift, 16))
_add("V_LSHRREV_B16", "u16", "u16 u16", _shift(np.right_shift, 16))
_add("V_ASHRREV_I16", "i16", "u16 i16", _shift(np.right_shift, 16))
_add("V_LSHLREV_B64", "u64", "u32 u64", _shift(np.left_shift, 64))
_add("V_LSHRREV_B64", "u64", "u32 u64", _shift(np.right_shift, 64))
_add("V_ASHRREV_I64", "i64", "u32 i64", _shift(np.right_shift, 64))
_add("V_ADD3_U32", "u32", "u32 u32 u32", lambda a, b, c: a + b + c)
_add("V_AND_OR_B32", "u32", "u32 u32 u32", lambda a, b, c: a & b | c)
_add("V_OR3_B32", "u32", "u32 u32 u32", lambda a, b, c: a | b | c)
_add("V_XAD_U32", "u32", "u32 u32 u32", lambda a, b, c: (a ^ b) + c)
_add("V_BFI_B32", "u32", "u32 u32 u32", lambda a, b, c: a & b | ~a & c)
_add("V_BFE_U32", "u32", "u32 u32 u32", _bfe)
_add("V_BFE_I32", "i32", "i32 u32 u32", _bfe_signed)
_add("V_LSHL_ADD_U32", "u32", "u32 u32 u32", lambda a, n, b: (a << (n & np.uint32(31))) + b)
_add("V_ADD_LSHL_U32", "u32", "u32 u32 u32", lambda a, b, n: (a + b) << (n & np.uint32(31)))
_add("V_LSHL_OR_B32", "u32", "u32 u32 u32", lambda a, n, b: a << (n & np.uint32(31)) | b)
_add(
    "V_LSHL_ADD_U64",
    "u64",
    "u64 u32 u64",
    lambda a, n, b: (a << (n & np.uint32(7)).astype(np.uint64)) + b,
)
_add(
    "V_ALIGNBIT_B32",
    "u32",
    "u32 u32 u32",
    lambda a, b, n: ((a.astype(np.uint64) << np.uint64(32) | b) >> (n & np.uint32(31))).astype(
        np.uint32
    ),
)
for _name, _first in (("V_MBCNT_LO_U32_B32", 0), ("V_MBCNT_HI_U32_B32", 32)):
    _below = np.array([(1 << min(max(i - _first, 0), 32)) - 1 for i in range(64)], np.uint32)
    _add(_name, "u32", "u32 u32", lambda a, b, m=_below: np.bitwise_count(a & m) + b)
_add("V_PERM_B32", "u32", "u32 u32 u32", _permute_bytes)
_add("V_MUL_LO_U32 V_MUL_LO_I32", "u32", "u32 u32", np.multiply)
_add("V_MUL_LO_U16", "u16", "u16 u16", np.multiply)
_add("V_MUL_HI_U32", "u32", "u32 u32", lambda a, b: _mul_high(a, b, np.uint64))
_add("V_MUL_HI_I32", "i32", "i32 i32", lambda a, b: _mul_high(a, b, np.int64))
_add(
    "V_MAD_U64_U32",
    "u64",
    "u32 u32 u64",
    lambda a, b, c: a.astype(np.uint64) * b.astype(np.uint64) + c,
)
_add(
    "V_MAD_I64_I32",
    "i64",
    "i32 i32 i64",
    lambda a, b, c: a.astype(np.int64) * b.astype(np.int64) + c,
)
_add(
    "V_MUL_U32_U24",
    "u32",
    "u32 u32",
    lambda a, b: (a & np.uint32(0xFFFFFF)) * (b & np.uint32(0xFFFFFF)),
)
_add(
    "V_MAD_U32_U24",
    "u32",
    "u32 u32 u32",
    lambda a, b, c: (a & np.uint32(0xFFFFFF)) * (b & np.uint32(0xFFFFFF)) + c,
)
_add("V_CVT_F32_I32", "f32", "i32", lambda x: x.astype(np.float32))
_add("V_CVT_F32_U32", "f32", "u32", lambda x: x.astype(np.float32))
_add("V_CVT_F32_F16", "f32", "f16", lambda x: x.astype(np.float32))
_add("V_CVT_F16_F32", "f16", "f32", lambda x: x.astype(np.float16))
_add("V_CVT_I32_F32", "i32", "f32", lambda x: _to_int(x, -(2**31), 2**31 - 1).astype(np.int32))
_add("V_CVT_U32_F32", "u32", "f32", lambda x: _to_int(x, 0, 2**32 - 1).astype(np.uint32))
_add("V_CVT_PK_BF16_F32", "u32", "f32 f32", lambda a, b: _bf16(a) | _bf16(b) << np.uint32(16))
_add(
    "V_CVT_PK_F16_F32",
    "u32",
    "f32 f32",
    lambda a, b: _half_bits(a) | _half_bits(b) << np.uint32(16),
)
_add(
    "V_PACK_B32_F16", "u32", "f16 f16", lambda a, b: _half_bits(a) | _half_bits(b) << np.uint32(16)
)
for _i in range(4):
    _add(
        f"V_CVT_F32_UBYTE{_i}",
        "f32",
        "u32",
        lambda x, i=_i: (x >> np.uint32(8 * i) & np.uint32(255)).astype(np.float32),
    )

COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "LT": np.less, "EQ": np.equal, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
    "NE": np.not_equal,
    "LG": lambda a, b: (a < b) | (a > b),
    "O": lambda a, b: ~(np.isnan(a) | np.isnan(b)), "U": lambda a, b: np.isnan(a) | np.isnan(b),
    "NGE": lambda a, b: ~(a >= b), "NLG": lambda a, b: ~((a < b) | (a > b)),
    "NGT": lambda a, b: ~(a > b), "NLE": lambda a, b: ~(a <= b), "NEQ": lambda a, b: ~(a == b),
    "NLT": lambda a, b: ~(a < b),
}  # fmt: skip


def comparison(name: str) -> tuple[str, Callable[[Array, Array], Array]] | None:
    """Type and function of V_CMP_*, None for another instruction."""
    match = re.fullmatch(r"V_CMP_([A-Z]+)_([FIU]\d\d)", name)
    if not match or match[1] not in COMPARISONS:
        return None
    return match[2].lower(), COMPARISONS[match[1]]
