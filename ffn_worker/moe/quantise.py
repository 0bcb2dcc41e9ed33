"""Expert weights in block-scaled formats, and conversions between the formats."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.wire.codecs import FP8_MAX
from afd.wire.codecs_torch import dequantise_mxfp4, quantise_mxfp4
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows, cat
from ffn_worker.moe.scheme import Scheme


@dataclass(frozen=True)
class Weight:
    """Weights [E, N, K] of one projection of E experts, or [N, K] of one expert.

    tag BFLOAT16 (or FLOAT16, FLOAT32): ``codes`` [E, N, K], no scales.
    tag E4M3FN, E4M3FNUZ: ``codes`` FP8 [E, N, K], ``scales`` float32 [E, N/128, K/128].
    tag E2M1: ``codes`` uint8 [E, N, K/2], even columns low; ``scales`` E8M0 uint8 [E, N, K/32].
    """

    tag: Tag
    codes: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Weight":
        """Wraps a float tensor."""
        return cls(EncodedRows.of(weight).tag, weight)

    @property
    def scheme(self) -> Scheme:
        if self.tag in FP8_MAX:
            return Scheme.FP8_BLOCK
        return Scheme.MXFP4 if self.tag == Tag.E2M1 else Scheme.PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K), counted in values, also for packed codes."""
        *leading, k = self.codes.shape
        return (*leading, 2 * k if self.tag == Tag.E2M1 else k)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Codes, and scales if there are any."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors)

    def clear(self) -> None:
        """Sets everything to 0."""
        for part in self.tensors:
            part.view(torch.uint8).zero_()

    def to(self, device: torch.device) -> "Weight":
        return self._each(lambda part: part.to(device))

    def __getitem__(self, experts: int | slice) -> "Weight":
        """A view of one expert or several."""
        return self._each(lambda part: part[experts])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Weight":
        return Weight(
            self.tag, change(self.codes), None if self.scales is None else change(self.scales)
        )


def quantise_weight(weight: torch.Tensor, tag: Tag) -> Weight:
    """Quantises [..., N, K]: FP8 in blocks of 128 x 128, MXFP4 in blocks of 32 columns.

    Raises:
        ConfigError: N or K is not a multiple of the block.
    """
    *leading, n, k = weight.shape
    if tag in FP8_MAX:
        if n % SCALE_BLOCK or k % SCALE_BLOCK:
            raise ConfigError(
                f"FP8 experts need sizes divisible by {SCALE_BLOCK}, not {n} x {k}; use "
                "ffn.weights: plain"
            )
        blocks = weight.float().view(*leading, n // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
        scales = blocks.abs().amax(dim=(-3, -1)) / FP8_MAX[tag]
        scales = torch.where(scales == 0, 1.0, scales)
        codes = (blocks / _spread(scales)).clamp(-FP8_MAX[tag], FP8_MAX[tag])
        return Weight(tag, codes.to(DTYPE_OF_TAG[tag]).view(*leading, n, k), scales)
    if tag == Tag.E2M1:
        if k % MX_BLOCK:
            raise ConfigError(
                f"MXFP4 experts need sizes divisible by {MX_BLOCK}, not {n} x {k}; use "
                "ffn.weights: plain"
            )
        codes, scales = quantise_mxfp4(weight.reshape(-1, k))
        return Weight(tag, codes.view(*leading, n, -1), scales.view(*leading, n, -1))
    return Weight(tag, weight.to(DTYPE_OF_TAG[tag]))


def dequantise_weight(weight: Weight) -> torch.Tensor:
    """Decodes to float32 [..., N, K]."""
    if weight.scales is None:
        return weight.codes.float()
    *leading, n, k = weight.shape
    if weight.tag == Tag.E2M1:
        flat = weight.codes.reshape(-1, k // 2), weight.scales.reshape(-1, k // MX_BLOCK)
        return dequantise_mxfp4(*flat, torch.float32).view(*leading, n, k)
    blocks = weight.codes.float().view(*leading, n // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    return (blocks * _spread(weight.scales)).view(*leading, n, k)


def in_scheme(weight: Weight, scheme: Scheme, fp8: Tag, dtype: torch.dtype) -> Weight:
    """Converts a weight to a scheme. Rounds once, unless the weight already has the scheme.

    Args:
        fp8: FP8 type that the device multiplies. dtype: dtype of plain weights.

    Raises:
        ConfigError: the sizes are not multiples of the scheme's blocks.
    """
    if weight.scheme is scheme is Scheme.FP8_BLOCK:
        return weight if weight.tag == fp8 else _fn_as_fnuz(weight)
    if weight.scheme is scheme:
        return weight if scheme is Scheme.MXFP4 else Weight.of(weight.codes.to(dtype))
    plain = dequantise_weight(weight)
    if scheme is Scheme.PLAIN:
        return Weight.of(plain.to(dtype))
    return quantise_weight(plain, fp8 if scheme is Scheme.FP8_BLOCK else Tag.E2M1)


def widened(gate_up: Weight, down: Weight, width: int) -> tuple[Weight, Weight]:
    """Pads an expert to ``width`` columns with zeros, which leaves its results unchanged.

    Args:
        gate_up: [2*I, H]. down: [H, I]. FP8: I and width multiples of 128; MXFP4: of 32.

    Returns:
        [2*width, H] and [H, width].
    """
    parts = _rows(gate_up, 0), _rows(gate_up, 1)
    padded = [_padded(part, width, part.shape[1]) for part in parts]
    scales = None
    if gate_up.scales is not None:
        scales = cat([part.scales for part in padded if part.scales is not None])
    return (
        Weight(gate_up.tag, cat([part.codes for part in padded]), scales),
        _padded(down, down.shape[0], width),
    )


def with_expert(weight: Weight, expert: Weight) -> Weight:
    """Appends ``expert`` [N, K], of the same tag, to ``weight``: [E + 1, N, K]."""
    scales = None
    if weight.scales is not None and expert.scales is not None:
        scales = cat([weight.scales, expert.scales[None]])
    return Weight(weight.tag, cat([weight.codes, expert.codes[None]]), scales)


def _rows(gate_up: Weight, half: int) -> Weight:
    return gate_up._each(lambda part: part.chunk(2)[half])


def _padded(weight: Weight, n: int, k: int) -> Weight:
    """Pads [N, K] with zeros to [n, k]."""
    more_n, more_k = n - weight.shape[0], k - weight.shape[1]
    per_byte = 2 if weight.tag == Tag.E2M1 else 1
    raw = weight.codes.view(torch.uint8) if weight.tag in FP8_MAX else weight.codes
    codes = F.pad(raw, (0, more_k // per_byte, 0, more_n)).view(weight.codes.dtype)
    if weight.scales is None:
        return Weight(weight.tag, codes)
    if weight.tag == Tag.E2M1:
        return Weight(weight.tag, codes, F.pad(weight.scales, (0, more_k // MX_BLOCK, 0, more_n)))
    more = (0, more_k // SCALE_BLOCK, 0, more_n // SCALE_BLOCK)
    return Weight(weight.tag, codes, F.pad(weight.scales, more, value=1.0))


def _spread(scales: torch.Tensor) -> torch.Tensor:
    """Reshapes block scales [..., N/128, K/128] to broadcast over [..., N/128, 128, K/128, 128]."""
    return scales.unsqueeze(-2).unsqueeze(-1)


def _fn_as_fnuz(weight: Weight) -> Weight:
    """Converts e4m3fn weights to e4m3fnuz, for gfx942, without rounding. NaN stays NaN.

    The same bits have half the value in e4m3fnuz (CDNA3 instruction set, section 7.2: bias 8), so
    the scales double.
    """
    assert weight.tag == Tag.E4M3FN and weight.scales is not None
    bits = weight.codes.view(torch.uint8)
    # 0x80 is -0 in e4m3fn and the only NaN of e4m3fnuz. 0x7F and 0xFF are the NaNs of e4m3fn.
    bits = torch.where(bits == 0x80, 0, torch.where(bits & 0x7F == 0x7F, 0x80, bits))
    codes = bits.to(torch.uint8).view(torch.float8_e4m3fnuz)
    return Weight(Tag.E4M3FNUZ, codes, weight.scales * 2)
