"""Reads slices of safetensors tensors: only their bytes, from any number of threads.

Contiguous slices are read by ``pread`` straight into the memory of a tensor. A slice within rows
goes through a mapping of that tensor, which touches the pages of the slice and is dropped at once.
So nothing but the returned tensors stays in memory.
"""

import mmap
import os
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np
import torch

from afd.errors import ConfigError
from afd.models.checkpoint import TensorInfo
from afd.models.weight_format import Range

Table = Mapping[str, TensorInfo]

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
}
"""By the names of safetensors headers. Powers of two (F8_E8M0) are read as their codes."""
_MOST_PER_CALL = 2**30
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class TensorFiles:
    """The tensors of one checkpoint. A context manager: it keeps the files open.

    bytes_read: bytes of the tensors that were returned so far.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.bytes_read = 0
        self._files: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read(
        self,
        name: str,
        ranges: tuple[Range, ...] = (),
        *,
        shape: tuple[int, ...] | None = None,
        pinned: bool = False,
    ) -> torch.Tensor:
        """Returns the tensor ``name``, cut to ``ranges`` in its leading dimensions, in host memory.

        Args:
            shape: counts the tensor's dimensions differently (same elements in the same order).
            pinned: in memory that a GPU copies from without a detour.

        Raises:
            ConfigError: the file cannot be read, or ends early.
        """
        info = self.table[name]
        whole = info.shape if shape is None else shape
        ends = [*ranges, *((0, size) for size in whole[len(ranges) :])]
        sizes = [end - begin for begin, end in ends]
        out = torch.empty(sizes, dtype=TORCH_DTYPES[info.dtype], pin_memory=pinned)
        self._fill(out, info, name, whole, ends)
        return out

    def read_into(
        self,
        out: torch.Tensor,
        name: str,
        ranges: tuple[Range, ...] = (),
        *,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Fills ``out``, which may be on a device or of another dtype, from a tensor's slice.

        Reads straight into ``out`` if it is contiguous host memory of the tensor's dtype.

        Raises:
            ConfigError: as :meth:`read`.
        """
        info = self.table[name]
        direct = out.device.type == "cpu" and out.is_contiguous()
        if direct and out.dtype == TORCH_DTYPES[info.dtype]:
            whole = info.shape if shape is None else shape
            ends = [*ranges, *((0, size) for size in whole[len(ranges) :])]
            self._fill(out, info, name, whole, ends)
            return
        host = self.read(name, ranges, shape=shape, pinned=out.device.type == "cuda")
        out.copy_(host.view(out.shape))

    def _fill(
        self,
        out: torch.Tensor,
        info: TensorInfo,
        name: str,
        shape: tuple[int, ...],
        ends: list[Range],
    ) -> None:
        if out.numel() == 0:
            return
        try:
            if _contiguous(shape, ends):
                first = sum(b * prod(shape[i + 1 :]) for i, (b, _) in enumerate(ends))
                at = info.offset + first * out.element_size()
                self._pread(out, info, name, at)
            else:
                self._copy_mapped(out, info, shape, ends)
        except OSError as error:
            raise ConfigError(
                f"{info.file} cannot be read at tensor {name} ({error.strerror}); check the disk "
                "or the network file system"
            ) from None
        with self._lock:
            self.bytes_read += out.nbytes

    def _pread(self, out: torch.Tensor, info: TensorInfo, name: str, at: int) -> None:
        into = out.view(-1).view(torch.uint8).numpy().data
        file = self._file(info.file)
        while into:
            count = os.preadv(file, [into[:_MOST_PER_CALL]], at)
            if count == 0:
                raise ConfigError(
                    f"{info.file} ends at byte {at}, inside of tensor {name}; download it again"
                )
            into, at = into[count:], at + count

    def _copy_mapped(
        self, out: torch.Tensor, info: TensorInfo, shape: tuple[int, ...], ends: list[Range]
    ) -> None:
        size = out.element_size()
        row = prod(shape[1:])
        begin = info.offset + ends[0][0] * row * size
        before = begin % mmap.ALLOCATIONGRANULARITY
        rows = ends[0][1] - ends[0][0]
        file = self._file(info.file)
        with mmap.mmap(
            file,
            before + rows * row * size,
            mmap.MAP_SHARED,
            mmap.PROT_READ,
            offset=begin - before,
        ) as mapped:
            mapped.madvise(mmap.MADV_WILLNEED)
            every = np.frombuffer(mapped, np.uint8, rows * row * size, before)
            view = every.view(_WORDS[size]).reshape(rows, *shape[1:])
            cut = view[tuple([slice(None), *(slice(*end) for end in ends[1:])])]
            np.copyto(out.view(torch.uint8).numpy().view(_WORDS[size]), cut)
            del every, view, cut  # they keep the mapping open

    def _file(self, path: Path) -> int:
        with self._lock:
            if path not in self._files:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            return self._files[path]


def _contiguous(shape: tuple[int, ...], ends: list[Range]) -> bool:
    """Whether the slice is one run of bytes: only its first dimension above 1 may be cut."""
    partial = [i for i, (b, e) in enumerate(ends) if e - b != shape[i]]
    return not partial or all(e - b == 1 for b, e in ends[: partial[-1]])
