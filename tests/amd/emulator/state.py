"""State of a wave and of the memory."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

LANES = 64
VCC, M0, EXEC = 106, 124, 126
FP16_OVFL = 23  # bit of the MODE register: conversions clamp to the largest finite number


class Unsupported(Exception):
    """The emulator does not model this instruction or operand."""


class MemoryFault(Exception):
    """An access outside of every buffer."""


class Memory:
    """Global memory: named buffers in one range of addresses, with unmapped gaps between them."""

    _BASE, _GAP = 0x7000_0000_0000, 4096

    def __init__(self, nbytes: int = 1 << 24) -> None:
        self._bytes = np.zeros(nbytes, np.uint8)
        self._mapped = np.zeros(nbytes, bool)
        self._next = self._GAP

    def put(self, array: npt.NDArray) -> int:
        """Copies an array in; returns its address (a multiple of 256)."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        start = self._next
        end = start + data.size
        if end > self._bytes.size:
            raise MemoryFault(f"{end} bytes do not fit into {self._bytes.size}")
        self._bytes[start:end] = data
        self._mapped[start:end] = True
        self._next = -(-(end + self._GAP) // 256) * 256
        return self._BASE + start

    def get(self, address: int, like: npt.NDArray) -> npt.NDArray:
        """Copies an array of the shape and type of ``like`` out."""
        start = address - self._BASE
        return self._bytes[start : start + like.nbytes].view(like.dtype).reshape(like.shape).copy()

    def load(self, addresses: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.uint8]:
        """uint8 [n, nbytes] from n addresses."""
        index = self._index(addresses, nbytes)
        return self._bytes[index]

    def store(self, addresses: npt.NDArray[np.int64], data: npt.NDArray[np.uint8]) -> None:
        index = self._index(addresses, data.shape[1])
        self._bytes[index] = data

    def _index(self, addresses: npt.NDArray[np.int64], nbytes: int) -> npt.NDArray[np.int64]:
        index = (addresses - self._BASE)[:, None] + np.arange(nbytes)
        inside = (index >= 0) & (index < self._bytes.size)
        if not inside.all() or not self._mapped[index].all():
            bad = next(
                int(a)
                for a, i in zip(addresses, index, strict=True)
                if not ((i >= 0) & (i < self._bytes.size)).all() or not self._mapped[i].all()
            )
            raise MemoryFault(f"access of {nbytes} bytes at {bad:#x}, outside of every buffer")
        return index


@dataclass
class Wave:
    """Registers of one wave. ``fnuz``: the FP8 instructions mean e4m3fnuz (CDNA3)."""

    memory: Memory
    lds: npt.NDArray[np.uint8]
    fnuz: bool
    pc: int
    s: list[int] = field(default_factory=lambda: [0] * 128)
    v: npt.NDArray[np.uint32] = field(default_factory=lambda: np.zeros((512, LANES), np.uint32))
    scc: int = 0
    mode: int = 0
    active: npt.NDArray[np.bool_] = field(default_factory=lambda: np.ones(LANES, bool))

    def get64(self, index: int) -> int:
        return self.s[index] | self.s[index + 1] << 32

    def set64(self, index: int, value: int) -> None:
        self.s[index] = value & 0xFFFFFFFF
        self.s[index + 1] = value >> 32 & 0xFFFFFFFF
        if index == EXEC:
            self.refresh()

    def set32(self, index: int, value: int) -> None:
        self.s[index] = value & 0xFFFFFFFF
        if index >= EXEC:
            self.refresh()

    def refresh(self) -> None:
        """After a write to EXEC."""
        self.active = bits_to_mask(self.get64(EXEC))

    @property
    def clamps(self) -> bool:
        return bool(self.mode >> FP16_OVFL & 1)


def bits_to_mask(bits: int) -> npt.NDArray[np.bool_]:
    return np.unpackbits(np.frombuffer(bits.to_bytes(8, "little"), np.uint8), bitorder="little") > 0


def mask_to_bits(mask: npt.NDArray[np.bool_]) -> int:
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")
