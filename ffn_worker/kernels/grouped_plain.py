"""Source and launch constants of grouped_plain.cu. Pure; no torch."""

from functools import cache

from ffn_worker.kernels import cuda_source

GATE_UP, DOWN = "gate_up", "down"
"""Its kernels, which have the same arguments."""
WARPGROUPS, STAGES = 3, 4
"""Warpgroups that multiply, with 64 rows of weights each; stages of the load pipeline."""
THREADS = 128 * (WARPGROUPS + 1)
MOST_ROWS = 192
"""Rows of the largest tile, limited by the registers for its sums."""
INSTRUCTIONS = range(8, MOST_ROWS + 1, 8)
"""N of the wgmma instructions in the source; a tile uses its rows rounded up."""
DEPTH, GROUP, ROW_BOX = 64, 16, 32
"""Columns of a stage; rows of weights in a group; rows per load of the copy engine."""
TILE_GROUPS = WARPGROUPS * 64 // GROUP
"""Groups of a tile, loaded with one copy."""
_SHARED_LIMIT = 227 * 1024
_STAGE_BYTES = (TILE_GROUPS * GROUP + MOST_ROWS) * DEPTH * 2 + 2 * 8
_STAGED_BYTES, _SOURCES_BYTES = WARPGROUPS * 2 * 4096, 256 * 4
_TILES_BYTES, _GROUP_BYTES = (STAGES + 1) * 16, 12
_CONSTANTS = {"STAGES": STAGES, "N_MAX": MOST_ROWS, "WARPGROUPS": WARPGROUPS}
OPTIONS = ("-arch=sm_90a", "--std=c++17", *(f"-D{name}={n}" for name, n in _CONSTANTS.items()))
"""Options for NVRTC."""


def wgmma(rows: int) -> str:
    """The wrapper of one instruction, weights [64, 16] x [rows, 16].T."""
    return cuda_source.wgmma(rows, 16, "bf16", "1, 1, 0, 0", MOST_ROWS // 2)


def _by_rows(rows: range) -> str:
    """CUDA C++ that multiplies with the smallest instruction of ``rows`` that fits the tile.

    Nested comparisons, not a switch: after a jump table the compiler does not know that all lanes
    of a warp take the same branch.
    """
    if len(rows) == 1:
        return f"multiply<{rows[0]}, GATED>(sums, shared, warpgroup, k_blocks, ring);"
    low, high = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return f"if (tile.rows <= {low[-1]}) {{ {_by_rows(low)} }} else {{ {_by_rows(high)} }}"


@cache
def source() -> str:
    """The complete CUDA C++, with its instruction wrappers."""
    functions = "\n".join(map(wgmma, INSTRUCTIONS))
    text = cuda_source.assembled("grouped_plain.cu").replace("WGMMA_FUNCTIONS", functions)
    return text.replace("MULTIPLY_BY_ROWS", _by_rows(INSTRUCTIONS))


def shared_bytes(experts: int) -> int:
    """Bytes of shared memory per block: stages, a tile's results and row addresses, and the runs
    of ``experts`` experts."""
    runs = (experts + 1) * _GROUP_BYTES
    return STAGES * _STAGE_BYTES + _STAGED_BYTES + _SOURCES_BYTES + _TILES_BYTES + runs


def most_experts() -> int:
    """Most experts whose runs fit into shared memory."""
    return (_SHARED_LIMIT - shared_bytes(0)) // _GROUP_BYTES
