"""CUDA C++ compiled by NVRTC and launched by the driver: what Triton has no words for.

NVRTC comes with torch's CUDA build, and cuda-bindings, by which it is called. The driver is called
by ctypes: cuda-bindings 13.0 keeps a tensor map where it is not aligned as the driver wants it.
No torch; streams and addresses are whole numbers.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from afd.errors import ConfigError

_UINT8, _SWIZZLE_128B, _PROMOTE_128B = 0, 3, 2
_MAX_DYNAMIC_SHARED = 8
"""Of cuda.h: CU_TENSOR_MAP_DATA_TYPE_UINT8, CU_TENSOR_MAP_SWIZZLE_128B,
CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES."""
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64

Argument = ctypes.c_int | ctypes.c_void_p | ctypes.Array


def compiled(source: str, name: str, options: Sequence[str]) -> bytes:
    """The cubin of CUDA C++.

    Raises:
        ConfigError: NVRTC is missing or refuses the source; with what it says.
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
            raise ConfigError(f"NVRTC refuses {name}: {log.decode().strip(chr(0))}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        cubin = b" " * size
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


@lru_cache(maxsize=4096)  # of every layer's weights, and of memory that an allocator gives again
def tensor_map(
    address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> ctypes.Array:
    """How the copy engine walks bytes at ``address``, to shared memory swizzled by 128 bytes; not
    to be written to.

    Args:
        sizes, box: in bytes or rows, innermost first; what a box has beyond the sizes reads as 0.
        strides: in bytes, of all dimensions but the innermost; multiples of 16.
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
    """A kernel in the current context. threads: of a block; shared: bytes of its dynamic memory."""

    handle: ctypes.c_void_p
    threads: int
    shared: int

    @classmethod
    def load(cls, cubin: bytes, name: str, threads: int, shared: int) -> "Function":
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        _call("cuModuleLoadData", ctypes.byref(module), cubin)
        _call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        _call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared)
        return cls(function, threads, shared)

    def launch(self, blocks: int, stream: int, arguments: Sequence[Argument]) -> None:
        """Arguments are copied: they need not outlive the call."""
        pointers = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        _call(
            "cuLaunchKernel",
            self.handle,
            *(blocks, 1, 1, self.threads, 1, 1, self.shared),
            ctypes.c_void_p(stream),
            pointers,
            None,
        )
