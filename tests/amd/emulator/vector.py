"""Vector instructions (VOP1, VOP2, VOP3, VOP3P, VOPC and their SDWA and DPP forms)."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from emulator import convert
from emulator.alu import OPERATIONS, TYPES, Operation, comparison, div_fmas32, div_scale32, fma32
from emulator.operands import (
    LITERAL,
    Array,
    Read,
    dpp_source,
    fields_of,
    literal_of,
    read_bits,
    read_scalar64,
    sdwa_source,
    sdwa_write,
    typed,
    write,
)
from emulator.state import LANES, VCC, Unsupported, Wave, bits_to_mask, mask_to_bits

Step = Callable[[Wave], None]


def _base(name: str) -> str:
    return re.sub(r"_E(32|64)$", "", name)


def _sources(instruction: Any, kinds: tuple[str, ...]) -> list[Read]:
    """Readers of the sources of an instruction in any encoding."""
    form, f = type(instruction).__name__, fields_of(instruction)
    literal = literal_of(instruction, f)
    out = []
    for i, kind in enumerate(kinds):
        if "SDWA" in form:
            select = sdwa_source(f, i)
            sign = {"negate": f[f"src{i}_neg"], "absolute": f[f"src{i}_abs"]}
            out.append(typed(0, kind, select=select, **{k: bool(v) for k, v in sign.items()}))
        elif "DPP" in form and i == 0:
            out.append(typed(0, kind, select=dpp_source(f)[0]))
        elif form.startswith("VOP3"):
            out.append(
                typed(
                    f[f"src{i}"],
                    kind,
                    negate=bool(f["neg"] >> i & 1),
                    absolute=bool(f.get("abs", 0) >> i & 1),
                    high=bool(f.get("opsel", 0) >> i & 1),
                )
            )
        else:
            code = f["src0"] if i == 0 else f["vsrc1"] + 256
            out.append(typed(code, kind, literal))
    return out


def _finish(instruction: Any, operation: Operation) -> Callable[[Wave, Array], None]:
    """Writer of the result, with the output modifiers of the encoding."""
    form, f = type(instruction).__name__, fields_of(instruction)
    if f.get("omod"):
        raise Unsupported(f"output multiplier of {instruction.op.name}")
    if "SDWA" in form:
        store = sdwa_write(f, operation.result)
    elif form.startswith("VOP3"):
        high = bool(f.get("opsel", 0) >> 3 & 1)
        store = write(f["vdst"], operation.result, high=high, keeps_high=operation.keeps_high)
    else:
        store = write(f["vdst"], operation.result, keeps_high=operation.keeps_high)
    if f.get("clmp"):
        if operation.result[0] != "f":
            raise Unsupported(f"integer clamp of {instruction.op.name}")
        plain = store
        store = lambda w, v: plain(w, np.clip(np.nan_to_num(v), 0, 1).astype(v.dtype))  # noqa: E731
    if "DPP" in form:
        lanes = dpp_source(f)[1]
        unmasked = store

        def store(w: Wave, value: Array) -> None:
            saved = w.active
            w.active = lanes(w)
            unmasked(w, value)
            w.active = saved

    return store


def vector(instruction: Any) -> Step:
    """One vector instruction as a function on a wave.

    Raises:
        Unsupported: the instruction or one of its operands is not modelled.
    """
    name = _base(instruction.op.name)
    for build in (_special, convert.conversion, _packed, _compare, _saturating, _table):
        step = build(name, instruction)
        if step is not None:
            return step
    raise Unsupported(f"{type(instruction).__name__} {instruction.op.name}")


def _table(name: str, instruction: Any) -> Step | None:
    operation = OPERATIONS.get(name)
    if operation is None:
        return None
    reads = _sources(instruction, operation.sources)
    store, function = _finish(instruction, operation), operation.function
    return lambda w: store(w, function(*[read(w) for read in reads]))


def _saturating(name: str, instruction: Any) -> Step | None:
    """Integer sums and differences with the clamp bit: they stop at the ends of their range."""
    f = fields_of(instruction)
    match = re.fullmatch(r"V_(ADD|SUB)_([UI])(16|32)", name)
    if not match or type(instruction).__name__ != "VOP3" or not f["clmp"]:
        return None
    kind = match[2].lower() + match[3]
    limits = np.iinfo(TYPES[kind])
    a, b = _sources(instruction, (kind, kind))
    store = write(f["vdst"], kind, high=bool(f["opsel"] >> 3 & 1))
    sign = 1 if match[1] == "ADD" else -1

    def step(w: Wave) -> None:
        total = a(w).astype(np.int64) + sign * b(w).astype(np.int64)
        store(w, np.clip(total, limits.min, limits.max).astype(TYPES[kind]))

    return step


def _compare(name: str, instruction: Any) -> Step | None:
    found = comparison(name)
    if found is None:
        return None
    kind, function = found
    f = fields_of(instruction)
    a, b = _sources(instruction, (kind, kind))
    form = type(instruction).__name__
    out = VCC
    if form == "VOP3_SDST":
        out = f["vdst"]
    elif "SDWA" in form and f["sd"]:
        out = f["sdst"]
    return lambda w: w.set64(out, mask_to_bits(function(a(w), b(w)) & w.active))


_CARRY = re.compile(r"V_(ADD|SUB|SUBREV|ADDC|SUBB|SUBBREV)_CO_U32")


def _special(name: str, instruction: Any) -> Step | None:
    """Instructions that read or write more than sources and one destination."""
    f, form = fields_of(instruction), type(instruction).__name__
    literal = literal_of(instruction, f)
    if name == "V_NOP":
        return lambda w: None
    if name == "V_CNDMASK_B32":
        no, yes = _sources(
            instruction, ("f32", "f32") if f.get("neg") or f.get("abs") else ("u32", "u32")
        )
        chooser = read_scalar64(f["src2"] if form == "VOP3" else VCC, 0)
        store = _finish(instruction, Operation("u32", (), np.add))
        return lambda w: store(
            w, np.where(bits_to_mask(chooser(w)), yes(w).view(np.uint32), no(w).view(np.uint32))
        )
    if name in ("V_FMAC_F32", "V_FMAMK_F32", "V_FMAAK_F32"):
        a, b = _sources(instruction, ("f32", "f32"))
        store = _finish(instruction, Operation("f32", (), np.add))
        constant = read_bits(LITERAL, literal)
        register = f["vdst"]
        if name == "V_FMAC_F32":
            return lambda w: store(w, fma32(a(w), b(w), w.v[register].view(np.float32)))
        if name == "V_FMAMK_F32":
            return lambda w: store(w, fma32(a(w), constant(w).view(np.float32), b(w)))
        return lambda w: store(w, fma32(a(w), b(w), constant(w).view(np.float32)))
    if name == "V_DIV_SCALE_F32":
        reads, out, store = _sources(instruction, ("f32",) * 3), f["sdst"], write(f["vdst"], "f32")

        def scale(w: Wave) -> None:
            value, flag = div_scale32(*[read(w) for read in reads])
            store(w, value)
            w.set64(out, mask_to_bits(flag & w.active))

        return scale
    if name == "V_DIV_FMAS_F32":
        reads, store = _sources(instruction, ("f32",) * 3), write(f["vdst"], "f32")

        def fmas(w: Wave) -> None:
            store(w, div_fmas32(*[read(w) for read in reads], bits_to_mask(w.get64(VCC))))

        return fmas
    if match := _CARRY.fullmatch(name):
        return _carry(match[1], instruction)
    if name.startswith("V_READFIRSTLANE_B32"):
        source, out = read_bits(f["src0"], literal), f["vdst"]
        return lambda w: w.set32(out, int(source(w)[int(np.argmax(w.active))]))
    if name == "V_READLANE_B32":
        source, lane = read_bits(f["src0"], 0), read_bits(f["src1"], 0)
        return lambda w: w.set32(f["vdst"], int(source(w)[int(lane(w)[0]) & 63]))
    if name == "V_WRITELANE_B32":
        source, lane = read_bits(f["src0"], 0), read_bits(f["src1"], 0)

        def write_lane(w: Wave) -> None:
            w.v[f["vdst"], int(lane(w)[0]) & 63] = source(w)[0]

        return write_lane
    if match := re.fullmatch(r"V_PERMLANE(16|32)_SWAP_B32", name):
        odd = np.arange(LANES) // int(match[1]) % 2 == 1
        one, two = f["vdst"], f["src0"] & 255

        def swap(w: Wave) -> None:
            first, second = w.v[one].copy(), w.v[two].copy()
            w.v[one][odd], w.v[two][~odd] = second[~odd], first[odd]

        return swap
    if match := re.fullmatch(r"V_BITOP3_B(16|32)", name):
        table = f["omod"] << 6 | f["abs"] << 3 | f["neg"]
        kind = "u" + match[1]
        opsel = f["opsel"]
        reads = [typed(f[f"src{i}"], kind, high=bool(opsel >> i & 1)) for i in range(3)]
        store = write(f["vdst"], kind, high=bool(opsel >> 3 & 1))
        return lambda w: store(w, _truth_table(table, *[read(w) for read in reads]))
    if re.fullmatch(r"V_(ACCVGPR_(READ|WRITE|MOV)\w*)", name):
        return _accumulator_move(name, f)
    return None


def _truth_table(table: int, a: Array, b: Array, c: Array) -> Array:
    out = np.zeros_like(a)
    for i in range(8):
        if table >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _accumulator_move(name: str, f: dict[str, int]) -> Step:
    if "READ" in name:
        source, base = read_bits(f["src0"], 0, accumulator=True), 0
    else:
        source, base = read_bits(f["src0"], 0, accumulator="MOV" in name), 256
    return lambda w: np.copyto(w.v[base + f["vdst"]], source(w), where=w.active)


def _carry(operator: str, instruction: Any) -> Step:
    f, form = fields_of(instruction), type(instruction).__name__
    a, b = _sources(instruction, ("u32", "u32"))
    three = form == "VOP3SD"
    out = f["sdst"] if three else VCC
    carry_in = read_scalar64(f["src2"] if three else VCC, 0)
    uses_carry = operator in ("ADDC", "SUBB", "SUBBREV")

    def step(w: Wave) -> None:
        x, y = a(w).astype(np.int64), b(w).astype(np.int64)
        if "REV" in operator:
            x, y = y, x
        extra = bits_to_mask(carry_in(w)).astype(np.int64) if uses_carry else 0
        total = x + y + extra if operator.startswith("ADD") else x - y - extra
        np.copyto(w.v[f["vdst"]], (total & 0xFFFFFFFF).astype(np.uint32), where=w.active)
        w.set64(out, mask_to_bits(((total >> 32) != 0) & w.active))

    return step


def _packed(name: str, instruction: Any) -> Step | None:
    """VOP3P: two 16-bit or two 32-bit results at once, and mixed-precision FMA."""
    if type(instruction).__name__ != "VOP3P":
        return None
    f = fields_of(instruction)
    high = f["opsel_hi"] | f["opsel_hi2"] << 2
    if name in ("V_MAD_MIX_F32", "V_MAD_MIXLO_F16", "V_MAD_MIXHI_F16"):
        return _mixed(name, f, high)
    if name == "V_PK_MOV_B32":
        reads = [
            read_bits(_pair(f["src0"], f["opsel"] & 1), 0),
            read_bits(_pair(f["src1"], f["opsel"] >> 1 & 1), 0),
        ]
        return _two_words(f["vdst"], reads, lambda a, b: (a, b))
    match = re.fullmatch(r"V_PK_(\w+)", name)
    operation = OPERATIONS.get(f"V_{match[1]}") if match else None
    if operation is None:
        return None
    if f["clmp"]:
        raise Unsupported(f"clamp of {name}")
    count, kind = len(operation.sources), operation.result
    halves = []
    for part in range(2):
        select, sign = (f["opsel"], f["neg"]) if part == 0 else (high, f["neg_hi"])
        halves.append(
            [
                _half(f[f"src{i}"], k, bool(select >> i & 1), bool(sign >> i & 1))
                for i, k in enumerate(operation.sources[:count])
            ]
        )
    low, upper = [
        (lambda w, reads=reads: operation.function(*[read(w) for read in reads]))
        for reads in halves
    ]
    if kind.endswith("32"):
        first, second = write(f["vdst"], kind), write(f["vdst"] + 1, kind)

        def step32(w: Wave) -> None:
            a, b = low(w), upper(w)
            first(w, a)
            second(w, b)

        return step32
    out = write(f["vdst"], "u32")

    def step16(w: Wave) -> None:
        a, b = (x.view(np.uint16).astype(np.uint32) for x in (low(w), upper(w)))
        out(w, a | b << np.uint32(16))

    return step16


def _pair(code: int, second: bool | int) -> int:
    """Register code of the low or high word of a 64-bit operand; constants have one word."""
    return code + 1 if second and (code >= 256 or code < 128) else code


def _half(code: int, kind: str, high: bool, negate: bool) -> Read:
    if kind.endswith("32"):
        return typed(_pair(code, high), kind, negate=negate)
    return typed(code, kind, high=high, negate=negate)


def _two_words(
    register: int, reads: list[Read], function: Callable[..., tuple[Array, Array]]
) -> Step:
    def step(w: Wave) -> None:
        a, b = function(*[read(w).copy() for read in reads])
        np.copyto(w.v[register], a, where=w.active)
        np.copyto(w.v[register + 1], b, where=w.active)

    return step


def _mixed(name: str, f: dict[str, int], high: int) -> Step:
    reads: list[Read] = []
    for i in range(3):
        half = bool(high >> i & 1)
        read = typed(
            f[f"src{i}"],
            "f16" if half else "f32",
            high=bool(f["opsel"] >> i & 1),
            negate=bool(f["neg"] >> i & 1),
            absolute=bool(f["neg_hi"] >> i & 1),
        )
        reads.append((lambda w, r=read: r(w).astype(np.float32)) if half else read)
    if f["clmp"]:
        raise Unsupported(f"clamp of {name}")
    if name == "V_MAD_MIX_F32":
        store = write(f["vdst"], "f32")
        return lambda w: store(w, fma32(*[read(w) for read in reads]))
    store = write(f["vdst"], "f16", high="HI" in name, keeps_high=True)
    return lambda w: store(w, fma32(*[read(w) for read in reads]).astype(np.float16))
