"""Compiles CUDA C++ with NVRTC and launches it with the driver, for kernels Triton cannot express.

torch's CUDA build brings NVRTC and cuda-bindings, which calls it. The driver is called through
ctypes, because cuda-bindings 13.0 does not align tensor maps as the driver requires. No torch;
streams and addresses are integers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from afd.errors import ConfigError

_UINT8, _SWIZZLE_128B, _PROMOTE_128B = 0, 3, 2
_MAX_DYNAMIC_SHARED = 8
"""From cuda.h: CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B,
CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64

Map = ctypes.Array[ctypes.c_char]
"""A tensor map, opaque to this process."""
Argument = ctypes.c_int | ctypes.c_void_p | Map


def compiled(source: str, name: str, options: Sequence[str]) -> bytes:
    """Compiles CUDA C++ and returns the cubin.

    Raises:
        ConfigError: NVRTC is missing or rejects the source; the message has its log.
    """
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ConfigError(
            f"NVRTC cannot be called ({error}); install cuda-bindings, or use another ffn.backend"
        ) from error
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise ConfigError(f"NVRTC cannot start: {status.name}")
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            program, len(options), [option.encode() for option in options]
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise ConfigError(f"NVRTC rejects {name}: {log.decode().strip(chr(0))}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin: bytes = b" " * size
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: object) -> None:
    status = _driver()[name](*arguments)
    if status:
        words = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(words))
        raise RuntimeError(f"{name}: {(words.value or b'').decode()} ({status})")


@lru_cache(maxsize=4096)  # maps of all layers' weights, and of memory that the allocator reuses
def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> Map:
    """A tensor map: how the copy engine loads bytes at ``address`` into shared memory, swizzled by
    128 bytes. Cached: do not modify the result.

    Args:
        sizes, box: sizes of the tensor and of one load, in bytes (innermost dimension, first) and
            rows. Positions of a box beyond the tensor read as 0.
        strides: in bytes, for all dimensions but the innermost; multiples of 16.
    """
    memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNMENT))()
    made = (ctypes.c_char * _MAP_BYTES).from_buffer(
        memory, -ctypes.addressof(memory) % _MAP_ALIGNMENT
    )
    rank = len(sizes)
    _call(
        "cuTensorMapEncodeTiled",
        made,
        _UINT8,
        rank,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*sizes),
        (ctypes.c_uint64 * (rank - 1))(*strides),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        0,
        _SWIZZLE_128B,
        _PROMOTE_128B,
        0,
    )
    return made


@dataclass(frozen=True)
class Function:
    """A kernel loaded in the current context. threads: per block. shared: bytes of dynamic shared
    memory per block."""

    handle: ctypes.c_void_p
    threads: int
    shared: int

    @classmethod
    def load(cls, cubin: bytes, name: str, threads: int, shared: int) -> "Function":
        """Loads the kernel ``name`` of a cubin."""
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        return cls(function, threads, shared)

    def launch(self, blocks: int, stream: int, arguments: Sequence[Argument]) -> None:
        """Launches ``blocks`` blocks on a stream. Copies the arguments before it returns."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _call(
            "cuLaunchKernel",
            self.handle,
            *(blocks, 1, 1, self.threads, 1, 1, self.shared),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )
