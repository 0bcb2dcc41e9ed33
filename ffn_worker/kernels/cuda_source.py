"""Sources of CUDA C++ put together for NVRTC, and the functions around their instructions. Pure."""

import re
from pathlib import Path


def assembled(name: str) -> str:
    """A source of this folder in one piece: each ``#include "..."`` is the file itself."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return re.sub(r'#include "(.+)"', lambda found: assembled(found[1]), text)


def wgmma(rows: int, depth: int, kind: str, flags: str, held: int) -> str:
    """A specialisation of ``wgmma<rows>``, around one instruction: d [64, rows] (+)= weights
    [64, depth] x [rows, depth].T.

    Args:
        kind: of both operands, as PTX names it. flags: what stands behind the predicate.
        held: registers of d, of which the first rows / 2 are used.
    """
    count = rows // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    name = f"wgmma.mma_async.sync.aligned.m64n{rows}k{depth}.f32.{kind}.{kind}"
    return f"""template <>
__device__ __forceinline__ void wgmma<{rows}>(float (&d)[{held}], u64 a, u64 b, int add) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{count + 2}, 0;\\n"
                 "{name} {{{registers}}}, %{count}, %{count + 1}, p, {flags};\\n}}"
                 : {outputs} : "l"(a), "l"(b), "r"(add));
}}
"""
