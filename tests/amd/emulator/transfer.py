"""Vector loads and stores: global, buffer and LDS."""

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from emulator.operands import Array, fields_of, read_scalar
from emulator.state import LANES, M0, MemoryFault, Unsupported, Wave

Step = Callable[[Wave], None]
_SIZES = {
    "UBYTE": 1, "SBYTE": 1, "BYTE": 1, "USHORT": 2, "SSHORT": 2, "SHORT": 2,
    "DWORD": 4, "DWORDX2": 8, "DWORDX3": 12, "DWORDX4": 16,
}  # fmt: skip


def transfer(instruction: Any) -> Step:
    """One load or store as a function on a wave.

    Raises:
        Unsupported: the instruction is not modelled.
    """
    build = {"GLOBAL": _global, "MUBUF": _buffer, "DS": _lds}.get(type(instruction).__name__)
    step = build(instruction.op.name, fields_of(instruction)) if build else None
    if step is None:
        raise Unsupported(f"{type(instruction).__name__} {instruction.op.name}")
    return step


def _put(w: Wave, register: int, lanes: Array, data: Array, kind: str) -> None:
    """Bytes [n, size] into registers of n lanes; ``kind`` says how less than 32 bits extend."""
    size = data.shape[1]
    if size >= 4:
        words = np.ascontiguousarray(data).view(np.uint32)
        for i in range(size // 4):
            w.v[register + i, lanes] = words[:, i]
        return
    value = np.ascontiguousarray(data).view(np.uint8 if size == 1 else np.uint16)[:, 0]
    if kind.startswith("S") and not kind.startswith("SHORT"):
        value = value.view(np.int8 if size == 1 else np.int16).astype(np.int32)
    value = value.astype(np.int32).view(np.uint32)
    old = w.v[register, lanes]
    if kind.endswith("D16_HI"):
        value = value << np.uint32(16) | old & np.uint32(0xFFFF)
    elif kind.endswith("D16"):
        value = value & np.uint32(0xFFFF) | old & np.uint32(0xFFFF0000)
    w.v[register, lanes] = value


def _take(w: Wave, register: int, lanes: Array, size: int, kind: str) -> Array:
    """Bytes [n, size] from registers of n lanes."""
    count = max(1, size // 4)
    words = np.ascontiguousarray(w.v[register : register + count, lanes].T)
    start = 2 if kind.endswith("D16_HI") else 0
    return words.view(np.uint8)[:, start : start + size]


def _parse(name: str, prefix: str) -> tuple[bool, str, int] | None:
    """(is a load, kind, bytes) of e.g. GLOBAL_LOAD_USHORT or BUFFER_STORE_SHORT_D16_HI."""
    match = re.fullmatch(rf"{prefix}_(LOAD|STORE)_([A-Z0-9]+)((?:_D16)?(?:_HI)?)", name)
    if not match or match[2] not in _SIZES:
        return None
    return match[1] == "LOAD", match[2] + match[3], _SIZES[match[2]]


def _global(name: str, f: dict[str, int]) -> Step | None:
    offset = f["offset"] - 0x2000 if f["offset"] & 0x1000 else f["offset"]
    base = 256 * f["acc"]
    into_lds = re.fullmatch(r"GLOBAL_LOAD_LDS_(DWORD|DWORDX3|DWORDX4)", name)

    def addresses(w: Wave, lanes: Array) -> Array:
        low = w.v[f["addr"], lanes].astype(np.int64)
        if f["saddr"] != 127:
            return low + w.get64(f["saddr"]) + offset
        return low + (w.v[f["addr"] + 1, lanes].astype(np.int64) << 32) + offset

    if into_lds:
        size = _SIZES[into_lds[1]]

        def direct(w: Wave) -> None:
            lanes = np.flatnonzero(w.active)
            _lds_direct(w, lanes, w.memory.load(addresses(w, lanes), size), offset)

        return direct
    if name in ("GLOBAL_ATOMIC_SWAP", "GLOBAL_ATOMIC_CMPSWAP"):
        data = base + f["data"]

        def swap(w: Wave) -> None:
            lanes = np.flatnonzero(w.active)
            for lane, address in zip(lanes, addresses(w, lanes), strict=True):
                at = np.array([address])
                old = w.memory.load(at, 4)
                if name.endswith("_SWAP") or old.view(np.uint32)[0, 0] == w.v[data + 1, lane]:
                    w.memory.store(at, w.v[data : data + 1, lane : lane + 1].view(np.uint8))
                if f["sc0"]:  # returns what was there
                    w.v[base + f["vdst"], lane] = old.view(np.uint32)[0, 0]

        return swap
    if name == "GLOBAL_ATOMIC_ADD_X2" and not f["sc0"]:
        data = base + f["data"]

        def add(w: Wave) -> None:
            lanes = np.flatnonzero(w.active)
            _atomic(w, addresses(w, lanes), w.v[data : data + 2, lanes].T, np.uint64)

        return add
    found = _parse(name, "GLOBAL")
    if found is None:
        return None
    load, kind, size = found

    def step(w: Wave) -> None:
        lanes = np.flatnonzero(w.active)
        if not lanes.size:
            return
        if load:
            _put(w, base + f["vdst"], lanes, w.memory.load(addresses(w, lanes), size), kind)
        else:
            w.memory.store(addresses(w, lanes), _take(w, base + f["data"], lanes, size, kind))

    return step


def _lds_direct(w: Wave, lanes: Array, data: Array, offset: int) -> None:
    """A load that goes to LDS: M0 + offset + the lane's number times its size."""
    index = (w.s[M0] & 0x3FFFF) + offset + lanes[:, None] * data.shape[1] + np.arange(data.shape[1])
    w.lds[index] = data


def _buffer(name: str, f: dict[str, int]) -> Step | None:
    found = _parse(name, "BUFFER")
    if name in ("BUFFER_WBL2", "BUFFER_INV"):
        return lambda w: None
    atomic = _ATOMICS.get(name.removeprefix("BUFFER_ATOMIC_"))
    if f["idxen"] or (found is None and (atomic is None or f["sc0"])):
        return None
    load, kind, size = found or (False, "DWORD", 4)
    resource, soffset = 4 * f["srsrc"], read_scalar(f["soffset"], 0)
    base = 256 * f["acc"]

    def step(w: Wave) -> None:
        lanes = np.flatnonzero(w.active)
        start = (w.s[resource] | w.s[resource + 1] << 32) & 0xFFFFFFFFFFFF
        records = w.s[resource + 2]
        index = np.full(lanes.size, f["offset"], np.int64)
        if f["offen"]:
            index += w.v[f["vaddr"], lanes]
        index += soffset(w)
        inside = index + size <= records
        address = start + index[inside]
        if load:
            data = np.zeros((lanes.size, size), np.uint8)  # out of range reads zero
            if inside.any():
                data[inside] = w.memory.load(address, size)
            if f["lds"]:
                _lds_direct(w, lanes, data, f["offset"])
            else:
                _put(w, base + f["vdata"], lanes, data, kind)
        elif atomic is not None:
            _atomic(w, address, w.v[base + f["vdata"], lanes[inside], None], atomic)
        elif inside.any():
            w.memory.store(address, _take(w, base + f["vdata"], lanes[inside], size, kind))

    return step


_ATOMICS = {
    "PK_ADD_BF16": ml_dtypes.bfloat16,
    "PK_ADD_F16": np.float16,
    "ADD_F32": np.float32,
    "ADD": np.uint32,
}


def _atomic(w: Wave, addresses: Array, values: Array, dtype: type) -> None:
    """Adds ``values`` [lanes, words of 32 bits] to memory lane by lane, as numbers of ``dtype``."""
    for address, words in zip(addresses, values, strict=True):
        at, added = np.array([address]), np.array([words], np.uint32).view(dtype)
        total = w.memory.load(at, 4 * words.size).view(dtype) + added
        w.memory.store(at, total.astype(dtype).view(np.uint8))


def _lds_at(w: Wave, address: Array, size: int) -> Array:
    # Base and offset are added in 32 bits: a base below zero with an offset above is in range.
    index = (address & 0xFFFFFFFF)[:, None] + np.arange(size)
    if index.size and (index.min() < 0 or index.max() >= w.lds.size):
        raise MemoryFault(
            f"LDS access at {int(index.max())}, only {w.lds.size} bytes are allocated"
        )
    return index


def _lds(name: str, f: dict[str, int]) -> Step | None:
    offset = f["offset0"] | f["offset1"] << 8
    base = 256 * f["acc"]
    if match := re.fullmatch(
        r"DS_(READ|WRITE)_([BUI])(8|16|32|64|96|128)((?:_D16)?(?:_HI)?)", name
    ):
        size = int(match[3]) // 8
        kind = ("S" if match[2] == "I" else "U") + match[4]

        def step(w: Wave) -> None:
            lanes = np.flatnonzero(w.active)
            index = _lds_at(w, w.v[f["addr"], lanes].astype(np.int64) + offset, size)
            if match[1] == "READ":
                _put(w, base + f["vdst"], lanes, w.lds[index], kind)
            else:
                w.lds[index] = _take(w, base + f["data0"], lanes, size, kind)

        return step
    if match := re.fullmatch(r"DS_(READ2|WRITE2)(ST64)?_B(32|64)", name):
        size = int(match[3]) // 8
        unit = size * (64 if match[2] else 1)

        def two(w: Wave) -> None:
            lanes = np.flatnonzero(w.active)
            address = w.v[f["addr"], lanes].astype(np.int64)
            indices = [_lds_at(w, address + unit * f[f"offset{i}"], size) for i in range(2)]
            if match[1] == "READ2":
                data = [w.lds[index] for index in indices]
                for i in range(2):
                    _put(w, base + f["vdst"] + i * size // 4, lanes, data[i], "U")
            else:
                for i in range(2):
                    w.lds[indices[i]] = _take(w, base + f[f"data{i}"], lanes, size, "U")

        return two
    if name in ("DS_BPERMUTE_B32", "DS_PERMUTE_B32"):
        return lambda w: _permute(w, f, offset, pull=name == "DS_BPERMUTE_B32")
    if name == "DS_SWIZZLE_B32":
        source = _swizzle(offset)

        def swizzle(w: Wave) -> None:
            value = np.where(w.active[source], w.v[f["addr"]][source], np.uint32(0))
            np.copyto(w.v[f["vdst"]], value, where=w.active)

        return swizzle
    if match := re.fullmatch(r"DS_READ_B64_TR_B(8|16)", name):
        return _transposed_read(f, offset, int(match[1]), base)
    return None


def _permute(w: Wave, f: dict[str, int], offset: int, *, pull: bool) -> None:
    lane = (w.v[f["addr"]] + np.uint32(offset)) >> np.uint32(2) & np.uint32(63)
    data = w.v[f["data0"]]
    if pull:
        value = np.where(w.active[lane], data[lane], np.uint32(0))
    else:
        value = np.zeros(LANES, np.uint32)
        value[lane[w.active]] = data[w.active]
    np.copyto(w.v[f["vdst"]], value, where=w.active)


def _swizzle(offset: int) -> Array:
    lane = np.arange(LANES)
    if offset >> 15:
        return (lane & ~3) + np.array([offset >> 2 * k & 3 for k in range(4)])[lane & 3]
    keep, force, flip = offset & 31, offset >> 5 & 31, offset >> 10 & 31
    return (lane & 32) + (((lane & 31 & keep) | force) ^ flip)


def _transposed_read(f: dict[str, int], offset: int, bits: int, base: int) -> Step:
    """CDNA4: 16 lanes read 8 bytes each, a matrix of rows of 16 elements, and get its columns."""
    dtype = np.uint16 if bits == 16 else np.uint8

    def step(w: Wave) -> None:
        index = _lds_at(w, w.v[f["addr"]].astype(np.int64) + offset, 8)
        data = w.lds[index].view(dtype).reshape(4, -1, 16)
        columns = np.ascontiguousarray(data.transpose(0, 2, 1)).reshape(LANES, -1).view(np.uint32)
        for i in range(2):
            np.copyto(w.v[base + f["vdst"] + i], columns[:, i], where=w.active)

    return step
