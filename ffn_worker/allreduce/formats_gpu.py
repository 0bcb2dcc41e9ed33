"""Codecs of the all-reduce block formats on a GPU, for tests and benchmarks.

:mod:`ffn_worker.allreduce.formats_table` describes the layout.
"""

import torch

from ffn_worker.allreduce import formats_triton as kernels
from ffn_worker.allreduce.formats_table import ATOM_VALUES, ReduceFormat

_AMD = torch.version.hip is not None


def _atoms(values: int) -> int:
    return -(-values // ATOM_VALUES)


def encode(x: torch.Tensor, fmt: ReduceFormat) -> torch.Tensor:
    """Encodes float [n], contiguous, to uint8 [ceil(n / 2048), fmt.atom_bytes]; pads with zeros."""
    n = x.numel()
    data = torch.empty((_atoms(n), fmt.atom_bytes), dtype=torch.uint8, device=x.device)
    kernels.encode_kernel[(_atoms(n),)](x, data, n, fmt.factor, fmt.bits, fmt.is_fp4, _AMD)
    return data


def decode(data: torch.Tensor, n: int, fmt: ReduceFormat, dtype: torch.dtype) -> torch.Tensor:
    """Inverse of :func:`encode`: returns the first n values."""
    x = torch.empty(n, dtype=dtype, device=data.device)
    kernels.decode_kernel[(_atoms(n),)](data, x, n, fmt.bits, fmt.is_fp4, _AMD)
    return x


def decode_sum(data: torch.Tensor, n: int, fmt: ReduceFormat) -> torch.Tensor:
    """Decodes uint8 [world, atoms, fmt.atom_bytes] and adds in rank order: float16 [n]."""
    x = torch.empty(n, dtype=torch.float16, device=data.device)
    kernels.decode_sum_kernel[(_atoms(n),)](
        data, x, n, data.stride(0), data.shape[0], fmt.bits, fmt.is_fp4, _AMD
    )
    return x
