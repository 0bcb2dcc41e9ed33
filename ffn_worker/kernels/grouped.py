"""Source and launch constants of grouped.cu. Pure; no torch."""

from functools import cache

from ffn_worker.kernels import cuda_source

ENTRY, THREADS, STAGES = "gate_up", 384, 4
WEIGHT_BOX = 128
"""Rows of weights per load of the copy engine; a tile has two loads, gate and up."""
USUAL_ROWS, MOST_ROWS = 144, 160
"""Rows of the largest tile. 160 is used only if 144 gave more tiles than multiprocessors: with the
sums of 160 rows, registers hold only half a product at a time."""
INSTRUCTIONS = (16, 32, 64, 96, 128)
"""N of the wgmma instructions in the source."""
_K_BLOCK, _SHARED_LIMIT = 128, 227 * 1024
_STAGE_BYTES = (2 * WEIGHT_BOX + MOST_ROWS) * _K_BLOCK + 2 * MOST_ROWS * 4 + 2 * 8
_STAGED_BYTES, _SOURCES_BYTES, _GROUP_BYTES = 2 * 16 * 256, MOST_ROWS * 4, 12
_CONSTANTS = {"N_MAX": MOST_ROWS, "N_USUAL": USUAL_ROWS, "STAGES": STAGES}
OPTIONS = ("-arch=sm_90a", "--std=c++17", *(f"-D{name}={n}" for name, n in _CONSTANTS.items()))
"""Options for NVRTC."""


def wgmma(rows: int) -> str:
    """The wrapper of one instruction, weights [64, 32] x [rows, 32].T."""
    return cuda_source.wgmma(rows, 32, "e4m3", "1, 1", rows // 2)


@cache
def source() -> str:
    """The complete CUDA C++, with its instruction wrappers."""
    functions = "\n".join(map(wgmma, INSTRUCTIONS))
    return cuda_source.assembled("grouped.cu").replace("WGMMA_FUNCTIONS", functions)


def shared_bytes(experts: int) -> int:
    """Bytes of shared memory per block: stages, a tile's results and row addresses, and the runs
    of ``experts`` experts."""
    runs = (experts + 1) * _GROUP_BYTES
    return STAGES * _STAGE_BYTES + _STAGED_BYTES + _SOURCES_BYTES + runs


def most_experts() -> int:
    """Most experts whose runs fit into shared memory."""
    return (_SHARED_LIMIT - shared_bytes(0)) // _GROUP_BYTES
