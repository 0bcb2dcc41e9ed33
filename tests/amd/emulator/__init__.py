"""Emulator of AMD CDNA3 and CDNA4 compute waves, enough for this project's kernels.

It runs the machine code that the compiler made, on one CPU core, with instructions decoded by
tinygrad's decoder and executed by numpy, 64 lanes at a time. It knows results, not time: no caches,
no memory order between waves, no hazards. What it does not know raises :class:`Unsupported`.

Sources: "AMD Instinct MI300 Instruction Set Architecture" (CDNA3) and "AMD Instinct CDNA4
Instruction Set Architecture", chapters 3 to 14; LLVM, "User Guide for AMDGPU Backend", for code
objects and the initial state of registers.
"""

from emulator.machine import Kernel, Memory, Unsupported

__all__ = ["Kernel", "Memory", "Unsupported"]
