"""The source of grouped.cu and what a launch of it needs to know. Pure; no torch."""

from functools import cache

from ffn_worker.kernels import cuda_source

ENTRY, THREADS, STAGES = "gate_up", 384, 4
WEIGHT_BOX = 128
"""Rows of weights that the copy engine loads at once: a tile has two of them, gate and up."""
USUAL_ROWS, MOST_ROWS = 144, 160
"""Rows of the largest tile: 160 only where there would be more tiles than multiprocessors, because
registers hold half a product beside the sums of so many."""
INSTRUCTIONS = (16, 32, 64, 96, 128)
"""N of the instructions that the source has."""
_K_BLOCK, _SHARED_LIMIT = 128, 227 * 1024
_STAGE_BYTES = (2 * WEIGHT_BOX + MOST_ROWS) * _K_BLOCK + 2 * MOST_ROWS * 4 + 2 * 8
_STAGED_BYTES, _SOURCES_BYTES, _GROUP_BYTES = 2 * 16 * 256, MOST_ROWS * 4, 12
_CONSTANTS = {"N_MAX": MOST_ROWS, "N_USUAL": USUAL_ROWS, "STAGES": STAGES}
OPTIONS = ("-arch=sm_90a", "--std=c++17", *(f"-D{name}={n}" for name, n in _CONSTANTS.items()))
"""What NVRTC is given."""


def wgmma(rows: int) -> str:
    """The function around one instruction, weights [64, 32] x [rows, 32].T."""
    return cuda_source.wgmma(rows, 32, "e4m3", "1, 1", rows // 2)


@cache
def source() -> str:
    """CUDA C++ in one piece, its instructions written out."""
    functions = "\n".join(map(wgmma, INSTRUCTIONS))
    return cuda_source.assembled("grouped.cu").replace("WGMMA_FUNCTIONS", functions)


def shared_bytes(experts: int) -> int:
    """Shared memory of a block: the pipeline, results and sources of a tile, the experts' runs."""
    runs = (experts + 1) * _GROUP_BYTES
    return STAGES * _STAGE_BYTES + _STAGED_BYTES + _SOURCES_BYTES + runs


def most_experts() -> int:
    """How many experts' runs fit into shared memory beside the rest."""
    return (_SHARED_LIMIT - shared_bytes(0)) // _GROUP_BYTES
