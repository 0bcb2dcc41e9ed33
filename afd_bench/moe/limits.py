"""Reference calls for the roofline: they measure what the machine reaches."""

from collections.abc import Mapping
from functools import partial

import torch

from afd_bench.moe.shapes import Ceilings
from afd_bench.moe.timing import Call

_COPY, _PRODUCT = "limit: copy", "limit: product"


class Limits:
    """A copy far larger than any cache, and a product of large square matrices in the operand type
    of a scheme.

    For MXFP4 the product is in bfloat16, as on Hopper and gfx942. On devices with FP4 instructions
    this ceiling is too low; ratios above 1 then show it.
    """

    def __init__(self, device: torch.device, scheme: str) -> None:
        on_gpu = device.type != "cpu"
        self._bytes, self._n = (2**30, 8192) if on_gpu else (2**26, 512)
        source = torch.zeros(self._bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        a = torch.randn(self._n, self._n, device=device).bfloat16()
        product: Call = partial(torch.matmul, a, a)
        if scheme == "fp8_block" and on_gpu and torch.cuda.get_device_capability(device) >= (8, 9):
            one, fp8 = torch.ones((), device=device), a.to(torch.float8_e4m3fn)
            product = partial(torch._scaled_mm, fp8, fp8.t(), one, one, out_dtype=torch.bfloat16)
        self.calls: dict[str, Call] = {_COPY: partial(target.copy_, source), _PRODUCT: product}

    def ceilings(self, seconds: Mapping[str, float]) -> Ceilings:
        """Computes both ceilings. seconds: time of each of ``calls``."""
        return Ceilings(2 * self._bytes / seconds[_COPY], 2 * self._n**3 / seconds[_PRODUCT])
