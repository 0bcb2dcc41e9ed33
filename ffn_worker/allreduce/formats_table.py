"""Block formats of the quantised all-reduce: names, sizes and layout. No numpy, no torch.

The layout is QuickReduce's (vLLM 0.26, csrc/quickreduce/quick_reduce_impl.cuh, `CodecQ4`,
`CodecQ6`, `CodecQ8`; AITER has the same INT4 and INT6). Data moves in atoms of 2,048 float16
values (4 KiB: 256 threads of 8 values). A scale covers 32 values: the
even or the odd ones of 64 neighbours. An encoded atom is its codes, thread by thread, then 64
float16 scales, even and odd of each group of 64 side by side.

FP4 is the format of the blog article "QuickReduce FP4 Quantization and Benchmarking on MI355":
e2m1 codes with a float16 scale, where OCP's MXFP4 has a power of two. FP16 is the plain values,
without scales: it is lossy only for the sums and for bfloat16 rows.

The codecs: :mod:`formats_numpy <ffn_worker.allreduce.formats_numpy>` is the byte-exact reference,
``formats_torch`` runs on CPUs, ``formats_triton`` on GPUs.
"""

from dataclasses import dataclass

from afd.config.choices import Choice

ATOM_VALUES = 2048
"""Values of one atom; a buffer is padded to a multiple of it."""
BLOCK = 32
"""Values that share a scale."""
EXACT = "exact"
"""Name of the choice to send rows as they are, without a format."""


@dataclass(frozen=True)
class ReduceFormat:
    """One block format. ``factor`` times the signed value of largest magnitude is the scale.

    bits: bits of one code. low, high: range of the scaled values. bias: added to a rounded value to
    make the unsigned code; 0 for formats without integer codes.
    """

    name: str
    bits: int
    factor: float
    low: float
    high: float
    bias: int

    @property
    def is_fp4(self) -> bool:
        return self.bits == 4 and not self.bias

    @property
    def code_bytes(self) -> int:
        """Bytes of an atom's codes."""
        return ATOM_VALUES * self.bits // 8

    @property
    def atom_bytes(self) -> int:
        """Bytes of an encoded atom: codes and scales."""
        return self.code_bytes + (ATOM_VALUES // BLOCK * 2 if self.bits < 16 else 0)

    @property
    def bits_per_value(self) -> float:
        return self.atom_bytes * 8 / ATOM_VALUES


def _integer(bits: int) -> ReduceFormat:
    half = 1 << (bits - 1)
    return ReduceFormat(f"int{bits}", bits, -1 / half, -half, half - 1, half)


INT8, INT6, INT4 = _integer(8), _integer(6), _integer(4)
FP4 = ReduceFormat("fp4", 4, 1 / 6, -6, 6, 0)
FP16 = ReduceFormat("fp16", 16, 1, -65504, 65504, 0)
FORMATS = {f.name: f for f in (FP16, INT8, INT6, INT4, FP4)}
"""All formats by name. A new one is one line here and its code in the codecs."""
REDUCE_FORMATS = (EXACT, *FORMATS)
"""Names that :func:`ffn_worker.allreduce.selection.make_collective` takes."""
CHOICES = (Choice(EXACT), *(Choice(f.name) for f in FORMATS.values() if f.bits < 16))
"""Values of ``ffn.reduce``. fp16 is not offered: it sends no fewer bytes than bfloat16 rows."""
