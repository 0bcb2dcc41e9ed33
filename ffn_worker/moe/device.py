"""Facts about the GPU, and about how a call is launched, for the MoE backends."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

import torch

from afd.devices import rocm
from afd.wire.layout import FP8_TAGS, Tag

FP8_OF_ARCH = {arch: FP8_TAGS[kind] for arch, kind in rocm.FP8_OF_ARCH.items()}
"""FP8 type of the matrix instructions of each AMD architecture."""
_launched_as: ContextVar[str | None] = ContextVar("launched_as", default=None)


def architecture() -> str | None:
    """LLVM name of the AMD GPU, such as "gfx950"; None without a ROCm device."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]


def device_kind(device: torch.device) -> str:
    """Name of the kind of device (:data:`afd.devices.DEVICES`): builds of torch for ROCm call their
    devices "cuda" too."""
    if device.type == rocm.ROCM.torch_type and torch.version.hip is not None:
        return rocm.ROCM.name
    return device.type


def native_fp8() -> Tag:
    """FP8 type that this machine multiplies; e4m3fn if it multiplies none."""
    return FP8_OF_ARCH.get(architecture() or "", Tag.E4M3FN)


@contextmanager
def launched_as(mode: str) -> Iterator[None]:
    """Within this context, in this thread, :func:`launch_mode` returns ``mode``.

    Used to compile the kernels of a graph before it is captured.
    """
    token = _launched_as.set(mode)
    try:
        yield
    finally:
        _launched_as.reset(token)


def launch_mode() -> str:
    """How launches run now: "graph" if they are captured, "eager" if the host launches them."""
    return _launched_as.get() or ("graph" if is_captured() else "eager")


def is_captured() -> bool:
    """Whether launches are captured in a graph now."""
    return _has_gpu() and torch.cuda.is_current_stream_capturing()


@cache
def _has_gpu() -> bool:
    return torch.cuda.is_available()


def launch_site(device: torch.device) -> tuple[int, int, int]:
    """(index of a CUDA device, its multiprocessors, the handle of its current stream)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return index, _multiprocessors(index), torch.cuda.current_stream(device).cuda_stream


@cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count
