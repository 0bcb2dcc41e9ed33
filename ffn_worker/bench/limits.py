"""What a machine reaches: the calls beside which a layer is timed."""

from collections.abc import Mapping
from functools import partial

import torch

from ffn_worker.bench.shapes import Ceilings
from ffn_worker.bench.timing import Call

_COPY, _PRODUCT = "limit: copy", "limit: product"


class Limits:
    """A copy far larger than any cache, and a product of large square matrices of the operands that
    a scheme multiplies.

    MXFP4 is multiplied in bfloat16 on Hopper and gfx942; where there are FP4 instructions this
    ceiling is too low, which the ratio then shows.
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
        """seconds: of each of ``calls``."""
        return Ceilings(2 * self._bytes / seconds[_COPY], 2 * self._n**3 / seconds[_PRODUCT])
