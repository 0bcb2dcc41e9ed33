"""Emulator of AMD CDNA3 and CDNA4 compute waves, sufficient for this project's kernels.

It runs compiled machine code on one CPU core: tinygrad decodes the instructions, and numpy executes
them for 64 lanes at a time. It models results, not time: no caches, no memory order between waves,
no hazards. Anything it does not model raises :class:`Unsupported`.

Sources: "AMD Instinct MI300 Instruction Set Architecture" (CDNA3) and "AMD Instinct CDNA4
Instruction Set Architecture", chapters 3 to 14; LLVM, "User Guide for AMDGPU Backend", for code
objects and the initial state of registers.
"""

from emulator.machine import Kernel, Memory, Unsupported

__all__ = ["Kernel", "Memory", "Unsupported"]
