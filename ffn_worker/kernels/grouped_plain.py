"""The source of grouped_plain.cu and what a launch of it needs to know. Pure; no torch."""

from functools import cache

from ffn_worker.kernels import cuda_source

GATE_UP, DOWN = "gate_up", "down"
"""Its kernels: their arguments are the same."""
WARPGROUPS, STAGES = 3, 4
"""Warpgroups that multiply, 64 rows of weights each; stages that are loaded ahead."""
THREADS = 128 * (WARPGROUPS + 1)
MOST_ROWS = 192
"""Rows of the largest tile: what registers hold the sums of."""
INSTRUCTIONS = range(8, MOST_ROWS + 1, 8)
"""N of the instructions that the source has: a tile's rows rounded up."""
DEPTH, GROUP, ROW_BOX = 64, 16, 32
"""Columns of a stage; rows of weights that lie together; rows that are loaded at once."""
TILE_GROUPS = WARPGROUPS * 64 // GROUP
"""Groups of a tile, which the copy engine loads at once."""
_SHARED_LIMIT = 227 * 1024
_STAGE_BYTES = (TILE_GROUPS * GROUP + MOST_ROWS) * DEPTH * 2 + 2 * 8
_STAGED_BYTES, _SOURCES_BYTES = WARPGROUPS * 2 * 4096, 256 * 4
_TILES_BYTES, _GROUP_BYTES = (STAGES + 1) * 16, 12
_CONSTANTS = {"STAGES": STAGES, "N_MAX": MOST_ROWS, "WARPGROUPS": WARPGROUPS}
OPTIONS = ("-arch=sm_90a", "--std=c++17", *(f"-D{name}={n}" for name, n in _CONSTANTS.items()))
"""What NVRTC is given."""


def wgmma(rows: int) -> str:
    """The function around one instruction, weights [64, 16] x [rows, 16].T."""
    return cuda_source.wgmma(rows, 16, "bf16", "1, 1, 0, 0", MOST_ROWS // 2)


def _by_rows(rows: range) -> str:
    """Statement that multiplies with the least of ``rows`` that holds the tile's. By comparisons:
    behind a jump by a table the compiler does not see that a warp goes one way."""
    if len(rows) == 1:
        return f"multiply<{rows[0]}, GATED>(sums, shared, warpgroup, k_blocks, ring);"
    low, high = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    return f"if (tile.rows <= {low[-1]}) {{ {_by_rows(low)} }} else {{ {_by_rows(high)} }}"


@cache
def source() -> str:
    """CUDA C++ in one piece, its instructions written out."""
    functions = "\n".join(map(wgmma, INSTRUCTIONS))
    text = cuda_source.assembled("grouped_plain.cu").replace("WGMMA_FUNCTIONS", functions)
    return text.replace("MULTIPLY_BY_ROWS", _by_rows(INSTRUCTIONS))


def shared_bytes(experts: int) -> int:
    """Shared memory of a block: the pipeline, results and sources of a tile, the experts' runs."""
    runs = (experts + 1) * _GROUP_BYTES
    return STAGES * _STAGE_BYTES + _STAGED_BYTES + _SOURCES_BYTES + _TILES_BYTES + runs


def most_experts() -> int:
    """How many experts' runs fit into shared memory beside the rest."""
    return (_SHARED_LIMIT - shared_bytes(0)) // _GROUP_BYTES
