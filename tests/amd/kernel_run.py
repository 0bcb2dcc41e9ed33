"""Runs one compiled kernel on the emulator."""

import numpy as np
from emulator import Kernel, Memory


class Runner:
    """Runs kernels of one architecture: arrays are copied in, results copied out.

    Args:
        compiled: the fixture of that name. arch: the architecture that the code is compiled for.
        runs_as: the architecture to emulate; default ``arch``.
    """

    def __init__(self, compiled, arch: str, runs_as: str = "") -> None:
        self.compiled, self.arch = compiled(arch), runs_as or arch

    def __call__(self, build: str, inputs: list, outputs: list, scalars: list, grid: tuple) -> list:
        """Runs a kernel with arguments inputs, outputs, scalars. Returns the outputs."""
        first = len(inputs)
        wanted = list(range(first, first + len(outputs)))
        return self.in_order(build, [*inputs, *outputs], wanted, scalars, grid)

    def in_order(
        self, build: str, arrays: list, wanted: list, scalars: list, grid: tuple, code: bytes = b""
    ) -> list[np.ndarray]:
        """Runs a kernel. Returns the arrays whose indices are in ``wanted``. ``code``, if given,
        replaces the build's machine code."""
        facts = self.compiled.index[build]
        code = code or self.compiled.code(build)
        kernel = Kernel(code, facts["kernel"], self.arch, facts["shared"])
        memory = Memory()
        addresses = [memory.put(a) for a in arrays]
        kernel.run(memory, [("q", a) for a in addresses] + scalars, grid, facts["warps"])
        return [memory.get(addresses[i], arrays[i]) for i in wanted]

    def on_parts(
        self,
        build: str,
        memory: np.ndarray,
        offsets: list[int],
        arrays: list[np.ndarray],
        scalars: list,
        grid: tuple,
    ) -> list[np.ndarray]:
        """Runs a kernel and returns ``arrays``. Its first pointers are ``memory`` plus each of
        ``offsets`` in bytes; the pointers of ``arrays`` follow."""
        facts = self.compiled.index[build]
        kernel = Kernel(self.compiled.code(build), facts["kernel"], self.arch, facts["shared"])
        there = Memory()
        base = there.put(memory)
        addresses = [base + offset for offset in offsets] + [there.put(a) for a in arrays]
        kernel.run(there, [("q", a) for a in addresses] + scalars, grid, facts["warps"])
        return [there.get(a, b) for a, b in zip(addresses[len(offsets) :], arrays, strict=True)]
