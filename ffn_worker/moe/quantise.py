"""Expert weights in the formats that block-scaled kernels share, and ways between them."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.wire.codecs import FP8_MAX
from afd.wire.codecs_torch import DTYPE_OF_TAG, dequantise_mxfp4, quantise_mxfp4
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows, cat


class Scheme(Enum):
    """Number format of the expert weights, by the name it has in a deployment file."""

    PLAIN = "plain"  # the serving dtype
    FP8_BLOCK = "fp8_block"  # FP8, one float32 scale per 128 x 128
    MXFP4 = "mxfp4"  # e2m1, one power of two per 32 columns


@dataclass(frozen=True)
class Weight:
    """Weights [E, N, K] of one projection of E experts; or [N, K], all shapes without E.

    tag BFLOAT16 (or FLOAT16, FLOAT32): ``codes`` [E, N, K], no scales.
    tag E4M3FN, E4M3FNUZ: ``codes`` FP8 [E, N, K], ``scales`` float32 [E, N/128, K/128].
    tag E2M1: ``codes`` uint8 [E, N, K/2], even columns low; ``scales`` E8M0 uint8 [E, N, K/32].
    """

    tag: Tag
    codes: torch.Tensor
    scales: torch.Tensor | None = None

    @classmethod
    def of(cls, weight: torch.Tensor) -> "Weight":
        """A float tensor as it is."""
        return cls(EncodedRows.of(weight).tag, weight)

    @property
    def scheme(self) -> Scheme:
        if self.tag in FP8_MAX:
            return Scheme.FP8_BLOCK
        return Scheme.MXFP4 if self.tag == Tag.E2M1 else Scheme.PLAIN

    @property
    def shape(self) -> tuple[int, ...]:
        """(E, N, K) in values, whatever a byte holds."""
        *leading, k = self.codes.shape
        return (*leading, 2 * k if self.tag == Tag.E2M1 else k)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def to(self, device: torch.device) -> "Weight":
        return self._each(lambda part: part.to(device))

    def __getitem__(self, experts: int | slice) -> "Weight":
        """One expert or some: a view."""
        return self._each(lambda part: part[experts])

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Weight":
        return Weight(
            self.tag, change(self.codes), None if self.scales is None else change(self.scales)
        )


def quantise_weight(weight: torch.Tensor, tag: Tag) -> Weight:
    """Quantises [..., N, K]: FP8 by blocks of 128 x 128, MXFP4 by rows of 32.

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
    """Float32 [..., N, K]."""
    if weight.scales is None:
        return weight.codes.float()
    *leading, n, k = weight.shape
    if weight.tag == Tag.E2M1:
        flat = weight.codes.reshape(-1, k // 2), weight.scales.reshape(-1, k // MX_BLOCK)
        return dequantise_mxfp4(*flat, torch.float32).view(*leading, n, k)
    blocks = weight.codes.float().view(*leading, n // SCALE_BLOCK, SCALE_BLOCK, -1, SCALE_BLOCK)
    return (blocks * _spread(weight.scales)).view(*leading, n, k)


def in_scheme(weight: Weight, scheme: Scheme, fp8: Tag, dtype: torch.dtype) -> Weight:
    """The same weight in another scheme, rounded once more; as it is where nothing changes.

    Args:
        fp8: the FP8 kind that the device multiplies. dtype: of a plain weight.

    Raises:
        ConfigError: the scheme's blocks do not divide the sizes.
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
    """An expert made ``width`` wide by columns of zeros: its results stay what they are.

    Args:
        gate_up: [2*I, H]. down: [H, I]. FP8: I and width multiples of 128; MXFP4: of 32.

    Returns:
        [2*width, H] and [H, width].
    """
    parts = _rows(gate_up, 0), _rows(gate_up, 1)
    padded = [_padded(part, width, part.shape[1]) for part in parts]
    scales = None if gate_up.scales is None else cat([part.scales for part in padded])
    return (
        Weight(gate_up.tag, cat([part.codes for part in padded]), scales),
        _padded(down, down.shape[0], width),
    )


def with_expert(weight: Weight, expert: Weight) -> Weight:
    """[E + 1, N, K]: ``weight`` and behind it ``expert`` [N, K] of the same tag."""
    scales = None
    if weight.scales is not None and expert.scales is not None:
        scales = cat([weight.scales, expert.scales[None]])
    return Weight(weight.tag, cat([weight.codes, expert.codes[None]]), scales)


def _rows(gate_up: Weight, half: int) -> Weight:
    return gate_up._each(lambda part: part.chunk(2)[half])


def _padded(weight: Weight, n: int, k: int) -> Weight:
    """[N, K] with zeros up to [n, k]."""
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
    """Block scales [..., N/128, K/128] to multiply [..., N/128, 128, K/128, 128] with."""
    return scales.unsqueeze(-2).unsqueeze(-1)


def _fn_as_fnuz(weight: Weight) -> Weight:
    """e4m3fn weights for gfx942: the same bits there are half the value (CDNA3 instruction set,
    section 7.2: bias 8). Nothing is rounded; what is NaN stays NaN."""
    assert weight.tag == Tag.E4M3FN and weight.scales is not None
    bits = weight.codes.view(torch.uint8)
    # 0x80 is -0 in one format and the only NaN of the other, whose 0x7F is a number.
    bits = torch.where(bits == 0x80, 0, torch.where(bits & 0x7F == 0x7F, 0x80, bits))
    codes = bits.to(torch.uint8).view(torch.float8_e4m3fnuz)
    return Weight(Tag.E4M3FNUZ, codes, weight.scales * 2)
