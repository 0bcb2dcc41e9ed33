"""Scalar instructions: arithmetic, branches, scalar loads, barriers."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator.operands import fields_of, literal_of, read_scalar, read_scalar64
from emulator.state import EXEC, VCC, Unsupported, Wave

Step = Callable[[Wave], str | None]
_NOTHING = {
    "S_NOP", "S_WAITCNT", "S_SETPRIO", "S_SLEEP", "S_ICACHE_INV", "S_DCACHE_INV", "S_DCACHE_WB",
    "S_TTRACEDATA", "S_SETHALT", "S_WAKEUP",
}  # fmt: skip


def _signed(value: int, bits: int = 32) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


# name -> (result, new SCC or None to keep it), of unsigned operands and the old SCC
_ALU: dict[str, Callable[[int, int, int], tuple[int, int | None]]] = {
    "S_ADD_U32": lambda a, b, c: (a + b, a + b >> 32),
    "S_SUB_U32": lambda a, b, c: (a - b, int(b > a)),
    "S_ADDC_U32": lambda a, b, c: (a + b + c, a + b + c >> 32),
    "S_SUBB_U32": lambda a, b, c: (a - b - c, int(b + c > a)),
    "S_ADD_I32": lambda a, b, c: (a + b, _overflow(_signed(a) + _signed(b))),
    "S_SUB_I32": lambda a, b, c: (a - b, _overflow(_signed(a) - _signed(b))),
    "S_MUL_I32": lambda a, b, c: (a * b, None),
    "S_MUL_HI_U32": lambda a, b, c: (a * b >> 32, None),
    "S_MUL_HI_I32": lambda a, b, c: (_signed(a) * _signed(b) >> 32, None),
    "S_MIN_I32": lambda a, b, c: (min(a, b, key=_signed), int(_signed(a) < _signed(b))),
    "S_MAX_I32": lambda a, b, c: (max(a, b, key=_signed), int(_signed(a) > _signed(b))),
    "S_MIN_U32": lambda a, b, c: (min(a, b), int(a < b)),
    "S_MAX_U32": lambda a, b, c: (max(a, b), int(a > b)),
    "S_CSELECT_B32": lambda a, b, c: (a if c else b, None),
    "S_CSELECT_B64": lambda a, b, c: (a if c else b, None),
    "S_PACK_LL_B32_B16": lambda a, b, c: (a & 0xFFFF | b << 16, None),
    "S_LSHL1_ADD_U32": lambda a, b, c: ((a << 1) + b, (a << 1) + b >> 32),
    "S_LSHL2_ADD_U32": lambda a, b, c: ((a << 2) + b, (a << 2) + b >> 32),
    "S_LSHL3_ADD_U32": lambda a, b, c: ((a << 3) + b, (a << 3) + b >> 32),
    "S_LSHL4_ADD_U32": lambda a, b, c: ((a << 4) + b, (a << 4) + b >> 32),
}
_LOGIC: dict[str, Callable[[int, int, int], int]] = {
    "AND": lambda a, b, m: a & b, "OR": lambda a, b, m: a | b, "XOR": lambda a, b, m: a ^ b,
    "ANDN2": lambda a, b, m: a & ~b & m, "ORN2": lambda a, b, m: a | ~b & m,
    "NAND": lambda a, b, m: ~(a & b) & m, "NOR": lambda a, b, m: ~(a | b) & m,
    "XNOR": lambda a, b, m: ~(a ^ b) & m,
    "LSHL": lambda a, b, m: a << (b & (63 if m >> 32 else 31)) & m,
    "LSHR": lambda a, b, m: a >> (b & (63 if m >> 32 else 31)),
    "BFM": lambda a, b, m: ((1 << (a & 31)) - 1) << (b & 31) & m,
}  # fmt: skip
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "EQ": lambda a, b: a == b, "LG": lambda a, b: a != b, "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b, "LT": lambda a, b: a < b, "LE": lambda a, b: a <= b,
}  # fmt: skip


def _overflow(value: int) -> int:
    return int(not -(2**31) <= value < 2**31)


def scalar(instruction: Any) -> Step:
    """One scalar instruction as a function on a wave; it returns "barrier" or "end" for those.

    Raises:
        Unsupported: the instruction is not modelled.
    """
    name = instruction.op.name
    form = type(instruction).__name__.removesuffix("_LIT")
    builders = {
        "SOP1": _sop1,
        "SOP2": _sop2,
        "SOPC": _sopc,
        "SOPK": _sopk,
        "SOPP": _sopp,
        "SMEM": _smem,
    }
    step = builders[form](name, instruction)
    if step is None:
        raise Unsupported(f"{form} {name}")
    return step


def _readers(name: str, instruction: Any) -> list[Callable[[Wave], int]]:
    f = fields_of(instruction)
    literal = literal_of(instruction, f)
    wide = name.endswith(("64", "U64"))
    codes = [f["ssrc0"]] + ([f["ssrc1"]] if "ssrc1" in f else [])
    out = []
    for i, code in enumerate(codes):
        shift_amount = i == 1 and re.match(r"S_(LSHL|LSHR|ASHR|BFE)_", name)
        read = read_scalar64 if wide and not shift_amount else read_scalar
        out.append(read(code, literal))
    return out


def _put(w: Wave, name: str, register: int, value: int) -> None:
    if name.endswith("64"):
        w.set64(register, value & 0xFFFFFFFFFFFFFFFF)
    else:
        w.set32(register, value)


def _sop2(name: str, instruction: Any) -> Step | None:
    a, b = _readers(name, instruction)
    out = fields_of(instruction)["sdst"]
    if name in _ALU:
        function = _ALU[name]

        def alu(w: Wave) -> None:
            value, scc = function(a(w), b(w), w.scc)
            _put(w, name, out, value)
            if scc is not None:
                w.scc = scc & 1

        return alu
    match = re.fullmatch(r"S_([A-Z0-9]+)_([BIU])(32|64)", name)
    if not match:
        return None
    operator, bits = match[1], int(match[3])
    mask = (1 << bits) - 1
    if operator in _LOGIC:
        logic = _LOGIC[operator]
        keeps = operator == "BFM"
        value_of = lambda w: logic(a(w), b(w), mask)  # noqa: E731
    elif operator == "ASHR":
        keeps = False
        value_of = lambda w: _signed(a(w), bits) >> (b(w) & (bits - 1)) & mask  # noqa: E731
    elif operator == "BFE":
        keeps, signed = False, match[2] == "I"

        def value_of(w: Wave) -> int:
            field = b(w)
            width = field >> 16 & 127
            value = a(w) >> (field & (bits - 1)) & ((1 << width) - 1)
            return (_signed(value, width) & mask) if signed and width else value
    else:
        return None

    def step(w: Wave) -> None:
        value = value_of(w)
        _put(w, name, out, value)
        if not keeps:
            w.scc = int(value != 0)

    return step


def _sop1(name: str, instruction: Any) -> Step | None:
    (a,) = _readers(name, instruction)
    out = fields_of(instruction)["sdst"]
    wide = name.endswith("64")
    mask = (1 << (64 if wide else 32)) - 1
    if match := re.fullmatch(r"S_(AND|OR|XOR|ANDN2|NAND|NOR|XNOR|ORN2)_SAVEEXEC_B64", name):
        logic = _LOGIC[match[1]]

        def save(w: Wave) -> None:
            old = w.get64(EXEC)
            value = logic(a(w), old, (1 << 64) - 1)
            w.set64(out, old)
            w.set64(EXEC, value)
            w.scc = int(value != 0)

        return save
    plain: dict[str, Callable[[int], int]] = {
        "MOV": lambda x: x, "BREV": lambda x: int(f"{x:0{64 if wide else 32}b}"[::-1], 2),
        "FF1_I32": lambda x: (x & -x).bit_length() - 1 & 0xFFFFFFFF,
        "FLBIT_I32": lambda x: (64 if wide else 32) - x.bit_length() if x else 0xFFFFFFFF,
        "SEXT_I32_I8": lambda x: _signed(x & 255, 8) & mask,
        "SEXT_I32_I16": lambda x: _signed(x & 0xFFFF, 16) & mask,
    }  # fmt: skip
    flagged: dict[str, Callable[[int], int]] = {
        "NOT": lambda x: ~x & mask, "BCNT1_I32": lambda x: x.bit_count(),
        "ABS_I32": lambda x: abs(_signed(x)),
    }  # fmt: skip
    key = re.sub(r"^S_|_B(32|64)$", "", name)
    if key in plain:
        function = plain[key]
        result = "S_32" if "_I32" in name else name
        return lambda w: _put(w, result, out, function(a(w)))
    if key in flagged:
        flag_function = flagged[key]

        def step(w: Wave) -> None:
            value = flag_function(a(w))
            _put(w, "S_32" if "_I32" in name else name, out, value)
            w.scc = int(value != 0)

        return step
    return None


def _sopc(name: str, instruction: Any) -> Step | None:
    a, b = _readers(name, instruction)
    if match := re.fullmatch(r"S_BITCMP([01])_B(32|64)", name):
        bit, last = int(match[1]), int(match[2]) - 1

        def test(w: Wave) -> None:
            w.scc = int(a(w) >> (b(w) & last) & 1 == bit)

        return test
    match = re.fullmatch(r"S_CMP_([A-Z]+)_([IU])(32|64)", name)
    if not match:
        return None
    function, bits = _COMPARE[match[1]], int(match[3])
    signed = match[2] == "I"

    def step(w: Wave) -> None:
        x, y = a(w), b(w)
        w.scc = int(function(_signed(x, bits), _signed(y, bits)) if signed else function(x, y))

    return step


def _sopk(name: str, instruction: Any) -> Step | None:
    f = fields_of(instruction)
    out, immediate = f["sdst"], _signed(f["simm16"], 16)
    if name == "S_MOVK_I32":
        return lambda w: w.set32(out, immediate)
    if name in ("S_ADDK_I32", "S_MULK_I32"):

        def step(w: Wave) -> None:
            x = _signed(w.s[out])
            value = x + immediate if name == "S_ADDK_I32" else x * immediate
            if name == "S_ADDK_I32":
                w.scc = _overflow(value)
            w.set32(out, value)

        return step
    if match := re.fullmatch(r"S_CMPK_([A-Z]+)_([IU])32", name):
        function, signed = _COMPARE[match[1]], match[2] == "I"

        def compare(w: Wave) -> None:
            x = _signed(w.s[out]) if signed else w.s[out]
            w.scc = int(function(x, immediate if signed else f["simm16"]))

        return compare
    if name == "S_SETREG_IMM32_B32":
        register, offset, size = f["simm16"] & 63, f["simm16"] >> 6 & 31, (f["simm16"] >> 11) + 1
        if register != 1:
            raise Unsupported(f"S_SETREG of hardware register {register}")
        mask = ((1 << size) - 1) << offset

        def set_mode(w: Wave) -> None:
            w.mode = w.mode & ~mask | f["literal"] << offset & mask

        return set_mode
    return None


_BRANCHES: dict[str, Callable[[Wave], bool]] = {
    "S_BRANCH": lambda w: True,
    "S_CBRANCH_SCC0": lambda w: not w.scc,
    "S_CBRANCH_SCC1": lambda w: bool(w.scc),
    "S_CBRANCH_VCCZ": lambda w: w.get64(VCC) == 0,
    "S_CBRANCH_VCCNZ": lambda w: w.get64(VCC) != 0,
    "S_CBRANCH_EXECZ": lambda w: w.get64(EXEC) == 0,
    "S_CBRANCH_EXECNZ": lambda w: w.get64(EXEC) != 0,
}


def _sopp(name: str, instruction: Any) -> Step | None:
    if name in _NOTHING or name.startswith("S_SET_GPR_IDX_OFF"):
        return lambda w: None
    if name == "S_ENDPGM":
        return lambda w: "end"
    if name == "S_BARRIER":
        return lambda w: "barrier"
    if name not in _BRANCHES:
        return None
    taken, offset = _BRANCHES[name], 4 * _signed(fields_of(instruction)["simm16"], 16)

    def step(w: Wave) -> None:
        if taken(w):  # pc already points behind the branch
            w.pc += offset

    return step


def _smem(name: str, instruction: Any) -> Step | None:
    if name in _NOTHING:
        return lambda w: None
    match = re.fullmatch(r"S_LOAD_DWORD(?:X(\d+))?", name)
    if not match:
        return None
    f = fields_of(instruction)
    count, out, base = int(match[1] or 1), f["sdata"], f["sbase"] * 2
    offset = _signed(f["offset"], 21) if f["imm"] else 0
    register = f["soffset"] if f["soffset_en"] else None

    def step(w: Wave) -> None:
        address = w.get64(base) + offset + (w.s[register] if register is not None else 0)
        words = w.memory.load(np.array([address & ~3]), 4 * count).view(np.uint32)[0]
        for i, word in enumerate(words.tolist()):
            w.set32(out + i, word)

    return step
