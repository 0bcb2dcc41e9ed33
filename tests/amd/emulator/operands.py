"""Operands of vector instructions: reading the sources and writing the results."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from emulator.alu import TYPES
from emulator.state import LANES, Unsupported, Wave

Array = npt.NDArray
Read = Callable[[Wave], Array]
Write = Callable[[Wave, Array], None]

_FLOATS = {
    240: 0.5,
    241: -0.5,
    242: 1.0,
    243: -1.0,
    244: 2.0,
    245: -2.0,
    246: 4.0,
    247: -4.0,
    248: 0.15915494,
}
LITERAL = 255


def fields_of(instruction: Any) -> dict[str, int]:
    """Raw bits of every field of a decoded instruction."""
    raw = instruction._raw
    return {name: raw >> f.lo & ((1 << (f.hi - f.lo + 1)) - 1) for name, f in instruction._fields}


def literal_of(instruction: Any, fields: dict[str, int]) -> int:
    return fields.get("literal", 0)


def scalar_constant(code: int, literal: int) -> int | None:
    """Value (32 bits) of an inline or literal constant, None for a register."""
    if 128 <= code <= 192:
        return code - 128
    if 193 <= code <= 208:
        return (192 - code) & 0xFFFFFFFF
    if code in _FLOATS:
        return struct.unpack("<I", struct.pack("<f", _FLOATS[code]))[0]
    return literal if code == LITERAL else None


def read_scalar(code: int, literal: int) -> Callable[[Wave], int]:
    """32 bits of a scalar source."""
    constant = scalar_constant(code, literal)
    if constant is not None:
        return lambda w: constant
    if code < 128:
        return lambda w: w.s[code]
    if code == 253:
        return lambda w: w.scc
    raise Unsupported(f"scalar operand {code}")


def read_scalar64(code: int, literal: int) -> Callable[[Wave], int]:
    """64 bits of a scalar source; 32-bit constants are sign-extended."""
    constant = scalar_constant(code, literal)
    if constant is not None:
        if code in _FLOATS:
            bits = struct.unpack("<Q", struct.pack("<d", _FLOATS[code]))[0]
            return lambda w: bits
        value = constant | (0xFFFFFFFF00000000 if constant >> 31 and code != LITERAL else 0)
        return lambda w: value
    return lambda w: w.get64(code)


def read_bits(code: int, literal: int, *, accumulator: bool = False) -> Read:
    """32 bits per lane, uint32 [64]."""
    if code >= 256:
        register = code - 256 + (256 if accumulator else 0)
        return lambda w: w.v[register]
    scalar = read_scalar(code, literal)
    if code >= 128 and code != 253:
        constant = np.full(LANES, scalar_constant(code, literal), np.uint32)
        return lambda w: constant
    return lambda w: np.full(LANES, scalar(w), np.uint32)


def read_bits64(code: int, literal: int) -> Read:
    """64 bits per lane, uint64 [64]."""
    if code >= 256:
        low = code - 256
        return lambda w: (
            w.v[low].astype(np.uint64) | w.v[low + 1].astype(np.uint64) << np.uint64(32)
        )
    scalar = read_scalar64(code, literal)
    return lambda w: np.full(LANES, scalar(w), np.uint64)


def half_constant(code: int) -> int | None:
    """An inline float constant as float16 bits, which is what 16-bit operands get."""
    if code in _FLOATS:
        return int(np.float16(_FLOATS[code]).view(np.uint16))
    return None


def typed(
    code: int,
    kind: str,
    literal: int = 0,
    *,
    negate: bool = False,
    absolute: bool = False,
    high: bool = False,
    select: Read | None = None,
) -> Read:
    """A source as an array of ``kind`` ("f32", "u16", ...), modifiers applied.

    high: 16-bit kinds take the upper half. select: replaces the plain register read (SDWA, DPP).
    """
    dtype = TYPES[kind]
    width = int(kind[1:])
    if width == 64:
        bits64 = read_bits64(code, literal)
        read: Read = lambda w: bits64(w).view(dtype)  # noqa: E731
    elif width == 32:
        bits = select or read_bits(code, literal)
        read = lambda w: bits(w).view(dtype)  # noqa: E731
    else:
        constant = half_constant(code) if kind == "f16" else None
        if constant is not None:
            values = np.full(LANES, constant, np.uint16).view(dtype)
            read = lambda w: values  # noqa: E731
        else:
            bits = select or read_bits(code, literal)
            shift = np.uint32(16 if high else 0)
            read = lambda w: (bits(w) >> shift).astype(np.uint16).view(dtype)  # noqa: E731
    if not (negate or absolute):
        return read
    if kind[0] != "f":
        raise Unsupported(f"sign modifier on {kind}")
    if absolute:
        plain = read
        read = lambda w: np.abs(plain(w))  # noqa: E731
    if not negate:
        return read
    unsigned = read
    return lambda w: -unsigned(w)


def write(register: int, kind: str, *, high: bool = False, keeps_high: bool = False) -> Write:
    """Stores a result in the lanes that EXEC selects. 16 bits into the low half clear the rest,
    as GFX9 does, unless ``keeps_high``; into the high half (``high``) they keep it."""
    width = int(kind[1:])
    if width == 64:

        def store64(w: Wave, value: Array) -> None:
            pair = np.ascontiguousarray(value).view(np.uint32).reshape(LANES, 2)
            np.copyto(w.v[register], pair[:, 0], where=w.active)
            np.copyto(w.v[register + 1], pair[:, 1], where=w.active)

        return store64
    if width == 32:
        return lambda w, value: np.copyto(w.v[register], value.view(np.uint32), where=w.active)

    def store16(w: Wave, value: Array) -> None:
        bits = value.view(np.uint16).astype(np.uint32)
        old = w.v[register]
        if high:
            bits = bits << np.uint32(16) | old & np.uint32(0xFFFF)
        elif keeps_high:
            bits |= old & np.uint32(0xFFFF0000)
        np.copyto(old, bits, where=w.active)

    return store16


_FIELD = {0: (0, 8), 1: (8, 8), 2: (16, 8), 3: (24, 8), 4: (0, 16), 5: (16, 16), 6: (0, 32)}


def sdwa_source(fields: dict[str, int], which: int) -> Read:
    """Source ``which`` of a sub-dword instruction: a byte or a half of a register, extended."""
    if which == 0:
        code = fields["vsrc0"] + (0 if fields["s0"] else 256)
    else:
        code = fields["vsrc1"] + (0 if fields["s1"] else 256)
    shift, width = _FIELD[fields[f"src{which}_sel"]]
    bits = read_bits(code, 0)
    mask = np.uint32((1 << width) - 1)
    if width == 32:
        return bits
    if not fields[f"src{which}_sext"]:
        return lambda w: bits(w) >> np.uint32(shift) & mask
    up = np.uint32(32 - width)
    return lambda w: (
        (bits(w) >> np.uint32(shift) << up).view(np.int32) >> up.astype(np.int32)
    ).view(np.uint32)


def sdwa_write(fields: dict[str, int], kind: str) -> Write:
    """Destination of a sub-dword instruction."""
    shift, width = _FIELD[fields["dst_sel"]]
    register, unused = fields["vdst"], fields["dst_unused"]
    if width == 32:
        return write(register, kind)
    if unused == 1:
        raise Unsupported("SDWA with a sign-extended destination")
    mask = np.uint32((1 << width) - 1)
    keep = np.uint32(~(int(mask) << shift) & 0xFFFFFFFF) if unused == 2 else np.uint32(0)

    def store(w: Wave, value: Array) -> None:
        bits = value.view(np.uint16 if kind[1:] == "16" else np.uint32).astype(np.uint32)
        old = w.v[register]
        np.copyto(old, old & keep | (bits & mask) << np.uint32(shift), where=w.active)

    return store


def dpp_lanes(control: int) -> tuple[Array, Array]:
    """(lane each lane reads, whether that lane exists) of a DPP control word."""
    lane = np.arange(LANES)
    row, i = lane & ~15, lane & 15
    amount = control & 15
    exists = np.ones(LANES, bool)
    if control < 0x100:
        source = (lane & ~3) + np.array([control >> 2 * k & 3 for k in range(4)])[lane & 3]
    elif 0x101 <= control <= 0x10F:
        source, exists = lane + amount, i + amount <= 15
    elif 0x111 <= control <= 0x11F:
        source, exists = lane - amount, i >= amount
    elif 0x121 <= control <= 0x12F:
        source = row + ((i - amount) & 15)
    elif control == 0x130:
        source, exists = lane + 1, lane < LANES - 1
    elif control == 0x138:
        source, exists = lane - 1, lane > 0
    elif control == 0x140:
        source = row + 15 - i
    elif control == 0x141:
        source = row + (i & 8 | 7 - (i & 7))
    elif control == 0x142:
        source, exists = row - 1, lane >= 16
    elif control == 0x143:
        source, exists = np.full(LANES, 31), lane >= 32
    elif 0x150 <= control <= 0x15F:
        source = row + amount
    else:
        raise Unsupported(f"DPP control {control:#x}")
    return np.where(exists, source, 0), exists


def dpp_source(fields: dict[str, int]) -> tuple[Read, Read]:
    """(source 0 read across lanes, lanes that the instruction may write)."""
    lane = np.arange(LANES)
    source, exists = dpp_lanes(fields["dpp"])
    enabled = (fields["row_mask"] >> lane // 16 & fields["bank_mask"] >> lane % 16 // 4 & 1) > 0
    register, bound = fields["vsrc0"], bool(fields["bc"])

    def read(w: Wave) -> Array:
        return np.where(exists & w.active[source], w.v[register][source], np.uint32(0))

    def lanes(w: Wave) -> Array:
        valid = exists & w.active[source]
        return w.active & enabled & (valid | bound)

    return read, lanes
