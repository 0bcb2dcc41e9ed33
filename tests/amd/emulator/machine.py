"""Loads a code object and runs its kernel, workgroup by workgroup."""

import functools
import itertools
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tinygrad.renderer.amd import decode_inst

from emulator.matrix import matrix
from emulator.scalar import scalar
from emulator.state import LANES, Memory, MemoryFault, Unsupported, Wave
from emulator.transfer import transfer
from emulator.vector import vector

__all__ = ["Kernel", "Memory", "MemoryFault", "Unsupported"]

Argument = tuple[str, int | float]
Step = Callable[[Wave], Any]
_MAX_STEPS = 2_000_000
"""Instructions one wave may execute: a kernel that loops for ever is an error, not a hang."""
_TURN = 200
"""Instructions of a wave before another workgroup may go on."""
_VOP3PX2 = 0xD3AC


@dataclass(frozen=True)
class _Descriptor:
    """What the hardware is told at launch (LLVM AMDGPU guide, "Kernel Descriptor")."""

    lds: int
    kernarg: int
    entry: int
    resources2: int
    properties: int

    @property
    def user_registers(self) -> int:
        return self.resources2 >> 1 & 31


class Kernel:
    """A kernel of a gfx942 or gfx950 code object.

    Args:
        code: the ELF file that the compiler wrote.
        name: the kernel's symbol.
        arch: "gfx942" or "gfx950"; the former's FP8 instructions mean e4m3fnuz.
        lds: bytes of LDS, where the launch asks for more than the code object says.
    """

    def __init__(self, code: bytes, name: str, arch: str, lds: int = 0) -> None:
        self._arch = arch
        self._image, symbols, kernels = _load(code)
        self._arguments = next(k[".args"] for k in kernels if k[".name"] == name)
        at = symbols[f"{name}.kd"]
        fixed, _, kernarg = struct.unpack_from("<III", self._image, at)
        (offset,) = struct.unpack_from("<q", self._image, at + 16)
        (resources2,) = struct.unpack_from("<I", self._image, at + 52)
        (properties,) = struct.unpack_from("<H", self._image, at + 56)
        self._descriptor = _Descriptor(
            max(fixed, lds), kernarg, at + offset, resources2, properties
        )
        self._steps: dict[int, tuple[Step, int]] = {}
        self.executed: dict[str, int] = {}

    @property
    def argument_sizes(self) -> list[int]:
        """Bytes of each argument that the caller gives, in order."""
        return [a[".size"] for a in self._given]

    @property
    def _given(self) -> list[dict[str, Any]]:
        return [a for a in self._arguments if not a[".value_kind"].startswith("hidden_")]

    def run(
        self, memory: Memory, arguments: Sequence[Argument], grid: Sequence[int], warps: int
    ) -> None:
        """Runs every workgroup of the grid, one after the other.

        Args:
            arguments: ("q", address), ("i", int32), ("l", int64) or ("f", float32), in order.
            grid: workgroups in x, y and z; missing ones are 1.

        Raises:
            Unsupported: an instruction is not modelled.
            MemoryFault: an access outside of every buffer.
            TimeoutError: a wave does not end.
        """
        for workgroup in self.workgroups(memory, arguments, grid, warps):
            for _ in workgroup:
                pass

    def workgroups(
        self, memory: Memory, arguments: Sequence[Argument], grid: Sequence[int], warps: int
    ) -> list[Iterator[None]]:
        """The launch of ``run`` as one iterator per workgroup, which the caller advances in any
        order: each step runs one wave for a while."""
        sizes = (*grid, 1, 1)[:3]
        block = memory.put(np.frombuffer(self._pack(arguments, sizes), np.uint8))
        places = itertools.product(*(range(size) for size in reversed(sizes)))
        return [self._workgroup(memory, block, (x, y, z), warps) for z, y, x in places]

    def _pack(self, arguments: Sequence[Argument], grid: Sequence[int]) -> bytes:
        """The block of kernel arguments: ours, then the sizes of the grid where they are asked."""
        out = bytearray(self._descriptor.kernarg + 256)
        for (kind, value), place in zip(arguments, self._given, strict=False):
            form = {"q": "<Q", "i": "<i", "l": "<q", "f": "<f"}[kind]
            if struct.calcsize(form) != place[".size"]:
                raise ValueError(f"{place['.size']} bytes are expected where ({kind}, {value}) is")
            struct.pack_into(form, out, place[".offset"], value)
        for place in self._arguments:
            if place[".value_kind"].startswith("hidden_block_count_"):
                axis = "xyz".index(place[".value_kind"][-1])
                struct.pack_into("<I", out, place[".offset"], grid[axis])
        return bytes(out)

    def _workgroup(
        self, memory: Memory, block: int, place: tuple[int, int, int], warps: int
    ) -> Iterator[None]:
        lds = np.zeros(self._descriptor.lds, np.uint8)
        waves = [self._wave(memory, lds, block, place, i) for i in range(warps)]
        while waves:
            at_barrier = []
            for w in waves:
                for _ in range(_MAX_STEPS // _TURN):
                    with np.errstate(all="ignore"):
                        event = self._run_until(w)
                    if event is not None:
                        break
                    yield
                else:
                    raise TimeoutError(f"a wave did not end within {_MAX_STEPS} instructions")
                if event == "barrier":
                    at_barrier.append(w)
            waves = at_barrier
            yield

    def _wave(
        self, memory: Memory, lds: npt.NDArray, block: int, place: tuple[int, int, int], index: int
    ) -> Wave:
        d = self._descriptor
        w = Wave(memory, lds, self._arch == "gfx942", d.entry)
        register = 0
        for bit, size in enumerate((4, 2, 2, 2, 2, 2, 1)):
            if d.properties >> bit & 1:
                if bit == 3:  # the address of the kernel arguments
                    w.set64(register, block)
                register += size
        register = d.user_registers
        for axis in range(3):
            if d.resources2 >> (7 + axis) & 1:
                w.s[register] = place[axis]
                register += 1
        w.v[0] = np.arange(LANES, dtype=np.uint32) + np.uint32(LANES * index)
        w.set64(126, (1 << 64) - 1)
        return w

    def _run_until(self, w: Wave) -> str | None:
        """Runs a wave until a barrier, its end, or for one turn (None)."""
        for _ in range(_TURN):
            step = self._steps.get(w.pc)
            if step is None:
                step = self._steps[w.pc] = self._decode(w.pc)
            w.pc += step[1]
            event = step[0](w)
            if event is not None:
                return event
        return None

    def _decode(self, pc: int) -> tuple[Step, int]:
        name, step, size = _decoded(self._image[pc : pc + 16])
        self.executed[name] = self.executed.get(name, 0) + 1
        return step, size


@functools.cache
def _decoded(data: bytes) -> tuple[str, Step, int]:
    """Name, effect and size of the instruction at the beginning of 16 bytes. Tests run the same
    code many times."""
    instruction = decode_inst(data, "cdna")
    if type(instruction).__name__ == "VOP3PX2" and int.from_bytes(data[2:4], "little") != _VOP3PX2:
        # Given 16 bytes, tinygrad 0.14 takes two plain matrix instructions for a scaled one.
        instruction = decode_inst(data[:8], "cdna")
    name, form = instruction.op.name, type(instruction).__name__
    if form.startswith("S"):
        step = scalar(instruction)
    elif form in ("GLOBAL", "MUBUF", "DS"):
        step = transfer(instruction)
    elif name.startswith("V_MFMA"):
        step = matrix(instruction)
    else:
        step = vector(instruction)
    return name, step, instruction.size()


def _load(code: bytes) -> tuple[bytes, dict[str, int], list[dict[str, Any]]]:
    """Memory image, symbols and kernel descriptions of a code object without relocations."""
    if code[:4] != b"\x7fELF":
        raise ValueError("not an ELF file")
    segments_at, sections_at = struct.unpack_from("<QQ", code, 32)
    segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", code, 54)
    image, kernels = bytearray(), []
    for i in range(segments):
        kind, _, offset, address, _, size, total = struct.unpack_from(
            "<IIQQQQQ", code, segments_at + i * segment_size
        )
        if kind == 1:
            image.extend(b"\0" * max(0, address + total - len(image)))
            image[address : address + size] = code[offset : offset + size]
        elif kind == 4:
            name_size, data_size, _ = struct.unpack_from("<III", code, offset)
            start = offset + 12 + -(-name_size // 4) * 4
            kernels = msgspec.msgpack.decode(code[start : start + data_size])["amdhsa.kernels"]
    headers = [
        struct.unpack_from("<IIQQQQIIQQ", code, sections_at + i * section_size)
        for i in range(sections)
    ]
    symbols = {}
    for _, kind, _, _, offset, size, link, _, _, entry in headers:
        if kind != 2:
            continue
        names = headers[link][4]
        for j in range(size // entry):
            name, _, _, _, value, _ = struct.unpack_from("<IBBHQQ", code, offset + j * entry)
            end = code.index(b"\0", names + name)
            symbols[code[names + name : end].decode()] = value
    return bytes(image) + b"\0" * 64, symbols, kernels
