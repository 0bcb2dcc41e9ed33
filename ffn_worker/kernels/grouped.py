"""The source of grouped.cu in its forms, and what a launch of it needs to know. Pure; no torch."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

K_BLOCK = 128
"""Columns of a stage of the pipeline, and of a scale."""
TILE_M, STAGES, THREADS = 256, 4, 384
ROW_BOX = 32
"""Rows that the copy engine loads at once."""
TILES = ((32, 32), (64, 64), (96, 96), (128, 128), (160, 80))
"""(rows, rows of one instruction): a tile takes the first that holds its rows. A product of 128
columns of the weights' rows is kept per warpgroup, and one instruction's beside it: 65,536
registers hold no more than this."""
MOST_ROWS = TILES[-1][0]
_STAGED_BYTES = 2 * 16 * TILE_M
_GROUP_BYTES = 12
_SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True)
class Form:
    """What a kernel does beside multiplying.

    gated: weights are gate and up; results are silu(gate) * up in FP8. gathered: rows lie where
    they came, ``sources`` tells the row of a slot; else they lie in their slots.
    """

    gated: bool
    gathered: bool


def wgmma(columns: int) -> str:
    """The function around one instruction: d [64, columns] (+)= a [64, 32] x b [columns, 32]."""
    count = columns // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{columns}k32.f32.e4m3.e4m3"
    return f"""template <>
__device__ __forceinline__ void wgmma<{columns}>(float (&d)[{count}], u64 a, u64 b, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
                 "{name} {{{registers}}}, %{count}, %{count + 1}, p, 1, 1;\\n}}"
                 : {outputs} : "l"(a), "l"(b), "r"(add));
}}
"""


@cache
def source(tiles: tuple[tuple[int, int], ...] = TILES) -> str:
    """CUDA C++; its instructions and its branches over tiles are written out from ``tiles``."""
    text = Path(__file__).with_suffix(".cu").read_text(encoding="utf-8")
    functions = "\n".join(wgmma(columns) for columns in sorted({chunk for _, chunk in tiles}))
    branches = "\nelse ".join(
        f"if (tile.rows <= {rows}) multiply<{rows}, {chunk}>(work);" for rows, chunk in tiles
    )
    return text.replace("WGMMA_FUNCTIONS", functions).replace("TILE_BRANCHES", branches)


def options(form: Form) -> tuple[str, ...]:
    """What NVRTC is given."""
    constants = {
        "TILE_M": TILE_M,
        "N_MAX": MOST_ROWS,
        "STAGES": STAGES,
        "BOX": ROW_BOX,
        "GATED": int(form.gated),
        "GATHERED": int(form.gathered),
    }
    defined = (f"-D{name}={value}" for name, value in constants.items())
    return ("-arch=sm_90a", "--std=c++17", *defined)


def shared_bytes(experts: int) -> int:
    """Shared memory of a block: the pipeline, results on their way out, the groups."""
    stage = (TILE_M + MOST_ROWS) * K_BLOCK + 2 * MOST_ROWS * 4 + 16
    return STAGES * stage + _STAGED_BYTES + (experts + 1) * _GROUP_BYTES


def most_experts() -> int:
    """How many groups' places fit into shared memory beside the rest."""
    return (_SHARED_LIMIT - shared_bytes(0)) // _GROUP_BYTES


def tile_rows(rows: int, limit: int) -> list[int]:
    """Rows of each tile of an expert: as grouped.cu cuts them. Tiles are as many as ``limit``
    makes necessary, and alike but for the last; multiples of 8, as scales are loaded."""
    parts = -(-rows // limit)
    each = -(-rows // max(parts, 1) // 8) * -8 if rows else 0
    each = (-(-rows // parts) + 7) // 8 * 8 if parts else 0
    return [min(each, rows - part * each) for part in range(parts)]
