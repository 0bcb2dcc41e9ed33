"""Backend on AITER's fused MoE, for AMD Instinct (gfx942: MI300X, MI325X; gfx950: MI350X, MI355X).

AITER selects the kernel (FlyDSL, CK or assembly) from its tuning tables. Verified by signature
(AITER e4048607) and by running its host code only: see docs/amd.md. Sources of what it expects, at
that commit: fused_moe.py (`fused_moe`, `_fused_moe_impl`), ops/shuffle.py (`shuffle_weight`,
`shuffle_scale`), op_tests/test_moe_2stage.py and op_tests/test_moe_ep.py.
"""

import importlib.util
from dataclasses import dataclass

import torch

from afd.errors import ConfigError
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.device import FP8_OF_ARCH, architecture, launch_mode
from ffn_worker.moe.load_counts import SlotLoad
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme


@dataclass(frozen=True)
class _Layer:
    """Shuffled weights and their scales, ready for `fused_moe`."""

    scheme: Scheme
    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor | None
    w2_scale: torch.Tensor | None


class AiterBackend(MoeBackend):
    """Experts [start, end) through `aiter.fused_moe`, which quantises rows to match the weights.

    Rows that already match are passed on unchanged: FP8 of this architecture's type for FP8_BLOCK
    weights, and MXFP4 for MXFP4 weights.

    Args:
        experts: half-open range of global expert ids of this instance.
        num_experts: experts of the model; None: ``end``.
        arch: "gfx942" or "gfx950"; None: that of the device.

    Raises:
        ConfigError: the device is another one.
    """

    takes_encoded = True
    capturable = True
    """Until MXFP4 weights come: captured graphs of AITER's MXFP4 kernels gave wrong tokens
    (https://github.com/ROCm/aiter/issues/3632)."""

    def __init__(
        self,
        experts: tuple[int, int],
        num_experts: int | None = None,
        *,
        arch: str | None = None,
    ) -> None:
        super().__init__(experts, num_experts)
        self._arch = arch or architecture()
        if self._arch not in FP8_OF_ARCH:
            raise ConfigError(
                f"MoE backend aiter runs on {' and '.join(FP8_OF_ARCH)}, not on {self._arch}; use "
                "the backend torch"
            )
        self.fp8 = FP8_OF_ARCH[self._arch]
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
            return f"sizes must be multiples of 32, not {hidden} and {intermediate}"
        return None

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        """Raises ConfigError for MXFP4 on gfx942, which has no FP4 instructions."""
        from aiter.ops.shuffle import shuffle_weight

        if w13.scheme is Scheme.MXFP4 and self._arch == "gfx942":
            raise ConfigError(
                "gfx942 has no FP4 matrix instructions; use ffn.weights: fp8_block there"
            )
        self.capturable = self.capturable and w13.scheme is not Scheme.MXFP4
        self._layers[layer] = _Layer(
            w13.scheme,
            shuffle_weight(_aiter_codes(w13), layout=(16, 16)),
            shuffle_weight(_aiter_codes(w2), layout=(16, 16)),
            _aiter_scales(w13),
            _aiter_scales(w2),
        )
        if self._mask is None:
            self._mask = self._expert_mask(w13.codes.device)

    def _expert_mask(self, device: torch.device) -> torch.Tensor:
        """int32 [num_experts + 1]: 1 for local experts. The last entry, 0, is for the id that
        masked pairs get."""
        mask = torch.zeros(self.num_experts + 1, dtype=torch.int32, device=device)
        mask[self.start : self.end] = 1
        return mask

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        held = self._layers[layer]
        scales = (scale for scale in (held.w1_scale, held.w2_scale) if scale is not None)
        return (held.w1, held.w2, *scales)

    def release(self, layer: int) -> None:
        del self._layers[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        return self.forward_encoded(layer, EncodedRows.of(x), topk_ids, topk_weights, x.dtype)

    def forward_encoded(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dtype: torch.dtype,
        load: SlotLoad | None = None,
        *,
        real: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See :class:`MoeBackend`; also supports padded batches.

        Args:
            real: int32 [1] on the device, the number of real rows; the results of further rows are
                undefined. A replayed graph reads the current value. None: in a graph, rows after
                the last unmasked pair are padding, which AITER skips, and their results are zero;
                otherwise all rows are real.
        """
        from aiter import ActivationType
        from aiter.fused_moe import fused_moe

        if load is not None:
            load.add(topk_ids)
        weights = self._layers[layer]
        x, scales = self._operands(rows, weights.scheme, dtype)
        if len(rows) == 0:
            return torch.zeros((0, weights.w2.shape[1]), dtype=dtype, device=x.device)
        padding = None
        if real is None and launch_mode() == "graph":
            padding, real = _padding(topk_ids)
        ids = torch.where(topk_ids < 0, self.num_experts, topk_ids).to(torch.int32)
        out: torch.Tensor = fused_moe(
            x,
            weights.w1,
            weights.w2,
            topk_weights,
            ids,
            expert_mask=self._mask,
            activation=ActivationType.Silu,
            quant_type=_quant_type(weights.scheme),
            w1_scale=weights.w1_scale,
            w2_scale=weights.w2_scale,
            a1_scale=scales,
            num_local_tokens=real,
            dtype=dtype,
        )
        return out if padding is None else out.masked_fill_(padding, 0)

    def _operands(
        self, rows: EncodedRows, weights: Scheme, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows and scales for AITER: unchanged if they match the weights, else decoded."""
        if weights is Scheme.FP8_BLOCK and rows.tag == self.fp8:
            return rows.payload, rows.scales
        if weights is Scheme.MXFP4 and rows.tag == Tag.E2M1 and rows.scales is not None:
            return (
                rows.payload.view(torch.float4_e2m1fn_x2),
                rows.scales.view(torch.float8_e8m0fnu),
            )
        return rows.decode(dtype), None


def _padding(topk_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bool [rows, 1], True after the last row with an unmasked pair; int32 [1], the rows before).

    Computed on the device, so a replayed graph looks at the masks of its own step.
    """
    numbers = torch.arange(1, len(topk_ids) + 1, dtype=torch.int32, device=topk_ids.device)
    real = ((topk_ids >= 0).any(dim=1) * numbers).amax().to(torch.int32).view(1)
    return (numbers > real).unsqueeze(1), real


def _quant_type(scheme: Scheme) -> object:
    """AITER's enum value for the scheme (aiter_enum.h, `QuantType`)."""
    from aiter import QuantType

    return {
        Scheme.PLAIN: QuantType.No,
        Scheme.FP8_BLOCK: QuantType.per_1x128,
        Scheme.MXFP4: QuantType.per_1x32,
    }[scheme]


def _aiter_codes(weight: Weight) -> torch.Tensor:
    return weight.codes.view(torch.float4_e2m1fn_x2) if weight.tag == Tag.E2M1 else weight.codes


def _aiter_scales(weight: Weight) -> torch.Tensor | None:
    """float32 block scales unchanged; E8M0 as [E * N, K/32], shuffled in tiles of 32 x 8."""
    if weight.tag != Tag.E2M1:
        return weight.scales
    from aiter.ops.shuffle import shuffle_scale

    assert weight.scales is not None
    flat = weight.scales.view(torch.float8_e8m0fnu)
    shuffled: torch.Tensor = shuffle_scale(flat.view(-1, flat.shape[-1]))
    return shuffled
