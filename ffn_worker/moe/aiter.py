"""Backend on AITER's fused MoE, for AMD Instinct (gfx942: MI300X, MI325X; gfx950: MI350X, MI355X).

AITER chooses the kernel (FlyDSL, CK or assembly) from its tuning tables. Verified by signature
(AITER e4048607) and host dispatch only: see docs/amd.md. What it expects of its caller, by file of
that commit: fused_moe.py (`fused_moe`, `_fused_moe_impl`), ops/shuffle.py (`shuffle_weight`,
`shuffle_scale`), op_tests/test_moe_2stage.py and op_tests/test_moe_ep.py.
"""

import importlib.util
from dataclasses import dataclass
from enum import Enum

import torch

from afd.errors import ConfigError
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import Tag
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.quantise import Weight, quantise_weight


class Scheme(Enum):
    """Number format of the expert weights. AITER quantises activations to match."""

    PLAIN = "plain"  # the serving dtype
    FP8_BLOCK = "fp8_block"  # FP8, 128 x 128 blocks, activations per 1 x 128
    MXFP4 = "mxfp4"  # e2m1, activations per 1 x 32


FP8_OF_ARCH = {"gfx942": Tag.E4M3FNUZ, "gfx950": Tag.E4M3FN}
"""The FP8 kind of each architecture's matrix instructions."""


@dataclass(frozen=True)
class _Layer:
    """Shuffled weights and the scales that go with them, ready for `fused_moe`."""

    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None


def architecture() -> str | None:
    """The GPU's LLVM name ("gfx950"), None without a ROCm device."""
    if torch.version.hip is None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]


class AiterBackend(MoeBackend):
    """Experts [start, end) through `aiter.fused_moe`.

    Args:
        experts: half-open range of global expert ids of this instance.
        num_experts: experts of the model; ``end`` where this instance is the last.
        scheme: number format of the weights; they are quantised on ``prepare``.
        arch: "gfx942" or "gfx950"; None asks the device.

    Raises:
        ConfigError: no ROCm device of these, or MXFP4 on gfx942, which has no FP4 instructions.
    """

    devices = ("cuda",)

    def __init__(
        self,
        experts: tuple[int, int],
        num_experts: int | None = None,
        *,
        scheme: Scheme = Scheme.PLAIN,
        arch: str | None = None,
    ) -> None:
        super().__init__(experts, num_experts)
        self._arch = arch or architecture()
        if self._arch not in FP8_OF_ARCH:
            raise ConfigError(
                f"MoE backend aiter runs on {' and '.join(FP8_OF_ARCH)}, not on {self._arch}; use "
                "the backend torch"
            )
        if scheme is Scheme.MXFP4 and self._arch == "gfx942":
            raise ConfigError("gfx942 has no FP4 matrix instructions; use fp8_block weights there")
        self._scheme = scheme
        self._layers: dict[int, _Layer] = {}
        self._mask: torch.Tensor | None = None

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        if importlib.util.find_spec("aiter") is None:
            return "the package aiter is not installed (it comes with ROCm images of vLLM)"
        if architecture() not in FP8_OF_ARCH:
            return f"the device is {architecture() or 'no ROCm GPU'}, not gfx942 or gfx950"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 or float16, not {dtype}"
        if hidden % 32 or intermediate % 32:
            return f"weights are shuffled in tiles of 32, hidden {hidden} x {intermediate} is not"
        return None

    def prepare(self, layer: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        from aiter.ops.shuffle import shuffle_weight

        tag = {
            Scheme.PLAIN: Tag.FLOAT16 if w13.dtype == torch.float16 else Tag.BFLOAT16,
            Scheme.FP8_BLOCK: FP8_OF_ARCH[self._arch],
            Scheme.MXFP4: Tag.E2M1,
        }[self._scheme]
        first, second = quantise_weight(w13, tag), quantise_weight(w2, tag)
        self._layers[layer] = _Layer(
            shuffle_weight(_aiter_codes(first), layout=(16, 16)),
            shuffle_weight(_aiter_codes(second), layout=(16, 16)),
            _aiter_scales(first),
            _aiter_scales(second),
        )
        if self._mask is None:
            self._mask = self._expert_mask(w13.device)

    def _expert_mask(self, device: torch.device) -> torch.Tensor:
        """int32 [num_experts + 1]: 1 where the expert is local. The last entry is nobody's: the
        id that masked pairs get."""
        mask = torch.zeros(self.num_experts + 1, dtype=torch.int32, device=device)
        mask[self.start : self.end] = 1
        return mask

    def release(self, layer: int) -> None:
        del self._layers[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        return self.run(layer, x, topk_ids, topk_weights)

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """`forward`, also for rows that are quantised already and for padded batches.

        Args:
            x: [capacity, H] in the serving dtype; or, with ``scales``, as the wire brings it: FP8
                of this architecture with float32 [capacity, H/128], or uint8 [capacity, H/2] of
                e2m1 pairs with E8M0 uint8 [capacity, H/32].
            topk_ids: int32 [capacity, K]. topk_weights: float32 [capacity, K].
            rows: int32 [1] on the device: how many rows are real; None: all. Graphs replay with
                another value in it.
            dtype: of the result, where ``x`` does not say it.

        Raises:
            ConfigError: rows in a format that these weights cannot take.
        """
        from aiter import ActivationType
        from aiter.fused_moe import fused_moe

        weights = self._layers[layer]
        if scales is None:
            dtype = x.dtype
        else:
            x, scales = self._quantised_rows(x, scales)
        if x.shape[0] == 0:
            return torch.zeros((0, weights.w2.shape[1]), dtype=dtype, device=x.device)
        ids = torch.where(topk_ids < 0, self.num_experts, topk_ids).to(torch.int32)
        return fused_moe(
            x,
            weights.w1,
            weights.w2,
            topk_weights,
            ids,
            expert_mask=self._mask,
            activation=ActivationType.Silu,
            quant_type=self._quant_type(),
            w1_scale=weights.w1_scale,
            w2_scale=weights.w2_scale,
            a1_scale=scales,
            num_local_tokens=rows,
            dtype=dtype,
        )

    def _quant_type(self) -> object:
        """AITER's name for the scheme (aiter_enum.h, `QuantType`); never the bare number."""
        from aiter import QuantType

        return {
            Scheme.PLAIN: QuantType.No,
            Scheme.FP8_BLOCK: QuantType.per_1x128,
            Scheme.MXFP4: QuantType.per_1x32,
        }[self._scheme]

    def _quantised_rows(
        self, x: torch.Tensor, scales: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scheme is Scheme.FP8_BLOCK and scales.dtype == torch.float32:
            wanted = FP8_OF_ARCH[self._arch]
            if x.dtype != DTYPE_OF_TAG[wanted]:
                raise ConfigError(
                    f"rows arrive as {x.dtype} but {self._arch} multiplies {wanted.name.lower()}; "
                    f"set wire.fp8: {wanted.name.lower()}"
                )
            return x, scales
        if self._scheme is Scheme.MXFP4 and scales.dtype == torch.uint8:
            return x.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)
        raise ConfigError(
            f"{self._scheme.value} experts cannot take rows of {x.dtype} with {scales.dtype} scales"
        )


def _aiter_codes(weight: Weight) -> torch.Tensor:
    return weight.codes.view(torch.float4_e2m1fn_x2) if weight.tag == Tag.E2M1 else weight.codes


def _aiter_scales(weight: Weight) -> torch.Tensor | None:
    """Block scales as they are (float32); E8M0 as [E * N, K/32], shuffled in tiles of 32 x 8."""
    if weight.tag != Tag.E2M1:
        return weight.scales
    from aiter.ops.shuffle import shuffle_scale

    flat = weight.scales.view(torch.float8_e8m0fnu)
    return shuffle_scale(flat.view(-1, flat.shape[-1]))
