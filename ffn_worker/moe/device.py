"""What the expert backends must know of the GPU they run on."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from afd.wire.layout import Tag

FP8_OF_ARCH = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
"""The FP8 kind of each AMD architecture's matrix instructions."""
_launched_as: ContextVar[str | None] = ContextVar("launched_as", default=None)


def architecture() -> str | None:
    """An AMD GPU's LLVM name ("gfx950"), None without a ROCm device."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]


def native_fp8() -> Tag:
    """The FP8 kind that this machine multiplies; e4m3fn where it multiplies none."""
    return FP8_OF_ARCH.get(architecture() or "", Tag.E4M3FN)


@contextmanager
def launched_as(mode: str) -> Iterator[None]:
    """Inside of it, in this thread, :func:`launch_mode` is ``mode``: to compile what a graph takes
    before one is captured."""
    token = _launched_as.set(mode)
    try:
        yield
    finally:
        _launched_as.reset(token)


def launch_mode() -> str:
    """How what is launched now will run: "graph", captured, or "eager", once, by the host."""
    return _launched_as.get() or ("graph" if is_captured() else "eager")


def is_captured() -> bool:
    """Whether what is launched now goes into a graph."""
    return _has_gpu() and torch.cuda.is_current_stream_capturing()


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def launch_site(device: torch.device) -> tuple[int, int, int]:
    """Number of a CUDA device, its multiprocessors, and the stream that is current there."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, _multiprocessors(index), torch.cuda.current_stream(device).cuda_stream


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
