"""Assembles CUDA C++ sources for NVRTC and writes wrappers of wgmma instructions. Pure."""

import re
from pathlib import Path


def assembled(name: str) -> str:
    """Returns a source of this folder with each ``#include "..."`` replaced by the file."""
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return re.sub(r'#include "(.+)"', lambda found: assembled(found[1]), text)


def wgmma(rows: int, depth: int, kind: str, flags: str, held: int) -> str:
    """CUDA C++ of ``wgmma<rows>``, which wraps one instruction:
    d [64, rows] (+)= weights [64, depth] x [rows, depth].T.

    Args:
        kind: type of both operands in PTX. flags: immediate operands after the predicate.
        held: registers of d; the first rows / 2 are used.
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
