"""Slot layout and codecs: the torch codecs equal the NumPy references bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import torch

from afd.errors import ConfigError
from afd.wire.codecs import (
    FP8_MAX,
    dequantise_fp8,
    dequantise_mxfp4,
    quantise_fp8,
    quantise_mxfp4,
)
from afd.wire.codecs_torch import dequantise_fp8 as dequantise_torch
from afd.wire.codecs_torch import dequantise_mxfp4 as dequantise_mxfp4_torch
from afd.wire.codecs_torch import encode
from afd.wire.codecs_torch import quantise_fp8 as quantise_torch
from afd.wire.codecs_torch import quantise_mxfp4 as quantise_mxfp4_torch
from afd.wire.layout import Tag, layouts
from afd.wire.slot_view_torch import SlotView

FP8 = [Tag.E4M3FN, Tag.E4M3FNUZ]


def adversarial(rows: int, hidden: int, seed: int) -> np.ndarray:
    """Returns random rows with blocks of zeros, huge values, denormals and rounding ties."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    x[0, :128] = 0
    x[1, :128] *= 1e30
    x[2, :128] *= 1e-38
    x[3, :128] = 448.0 * np.sign(x[3, :128])
    x[4, :128] = np.linspace(-448, 448, 128)
    x[5, 0] = 1e-45
    x[6, :128] = np.tile(np.arange(-32, 32) / 8, 2)  # rounding ties of e2m1 at amax 4
    x[6, 128:256] = np.arange(128) / 128 * 6 * 2.0**-130
    x[7, :128] = -0.0
    return x


@pytest.mark.parametrize("tag", FP8)
@pytest.mark.parametrize("seed", range(5))
def test_torch_codec_equals_the_reference(seed, tag):
    x = adversarial(8, 512, seed)
    codes, scales = quantise_fp8(x, tag)
    codes_t, scales_t = quantise_torch(torch.from_numpy(x), tag)
    np.testing.assert_array_equal(scales, scales_t.numpy())
    np.testing.assert_array_equal(codes, codes_t.view(torch.uint8).numpy())
    back = dequantise_torch(codes_t, scales_t, torch.float32).numpy()
    np.testing.assert_array_equal(dequantise_fp8(codes, scales, tag), back)


@pytest.mark.parametrize("seed", range(5))
def test_torch_mxfp4_equals_the_reference(seed):
    x = adversarial(8, 512, seed)
    x[0, 200], x[1, 300] = np.nan, -np.inf
    codes, scales = quantise_mxfp4(x)
    codes_t, scales_t = quantise_mxfp4_torch(torch.from_numpy(x))
    np.testing.assert_array_equal(scales, scales_t.numpy())
    np.testing.assert_array_equal(codes, codes_t.numpy())
    back = dequantise_mxfp4_torch(codes_t, scales_t, torch.float32).numpy()
    np.testing.assert_array_equal(dequantise_mxfp4(codes, scales), back)


@pytest.mark.parametrize("tag", FP8)
def test_error_is_within_half_a_step_of_e4m3(tag):
    x = adversarial(8, 512, 1)
    back = dequantise_fp8(*quantise_fp8(x, tag), tag).astype(np.float64)
    block_max = np.abs(x.astype(np.float64).reshape(8, 4, 128)).max(-1).repeat(128, -1)
    # The bound is half a unit of the last of 3 mantissa bits, or half of the block's smallest
    # denormal, which is 2^-9 in e4m3fn and 2^-10 in e4m3fnuz.
    step = 2**-10 if tag == Tag.E4M3FN else 2**-11
    bound = np.abs(x.astype(np.float64)) * 2**-4
    bound = np.maximum(bound, block_max.reshape(8, 512) / FP8_MAX[tag] * step) * 1.0001
    # A scale below 2^-126 is itself denormal; its rounding adds a tiny absolute error.
    assert (np.abs(back - x) <= bound + 512 * 2.0**-149).all()


def ocp_mxfp4(block: np.ndarray) -> np.ndarray:
    """Encodes one block as in OCP Microscaling 1.0, section 6.3, by search in float64."""
    grid = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exponent = max(np.floor(np.log2(np.abs(block).max())) - 2, -127)
    out = []
    for value in block.astype(np.float64) / 2.0**exponent:
        distance = np.abs(grid - min(abs(value), 6.0))
        nearest = np.flatnonzero(distance == distance.min())
        code = next(c for c in nearest if len(nearest) == 1 or c % 2 == 0)
        out.append(np.copysign(grid[code], value) * 2.0**exponent)
    return np.array(out)


@pytest.mark.parametrize("seed", range(3))
def test_mxfp4_follows_the_ocp_rule(seed):
    x = adversarial(8, 256, seed)
    back = dequantise_mxfp4(*quantise_mxfp4(x)).astype(np.float64)
    for got, block in zip(back.reshape(-1, 32), x.reshape(-1, 32), strict=True):
        want = ocp_mxfp4(block) if block.any() else np.zeros(32)
        np.testing.assert_array_equal(got, want)


def test_mxfp4_error_bound():
    x = adversarial(8, 512, 3).astype(np.float64)
    back = dequantise_mxfp4(*quantise_mxfp4(x.astype(np.float32))).astype(np.float64)
    block_max = np.abs(x.reshape(8, 16, 32)).max(-1).repeat(32, -1).reshape(8, 512)
    # Values above 6 * 2^e saturate. The largest are just below 8 * 2^e and lose a quarter.
    assert (np.abs(back - x) <= block_max / 4 + 2.0**-128).all()


@pytest.mark.parametrize("tag", [*FP8, Tag.E2M1])
def test_nan_and_infinity_turn_their_block_into_nan(tag):
    x = np.ones((2, 256), np.float32)
    x[0, 3], x[1, 200] = np.nan, np.inf
    width = 32 if tag == Tag.E2M1 else 128
    if tag == Tag.E2M1:
        back = dequantise_mxfp4(*quantise_mxfp4(x))
    else:
        back = dequantise_fp8(*quantise_fp8(x, tag), tag)
    broken = np.isnan(back).reshape(2, -1, width)
    assert (broken.all(-1) == broken.any(-1)).all()
    assert broken.all(-1).sum() == 2 and broken[0, 0].all() and broken[1, 200 // width].all()
    assert (back[~np.isnan(back)] == 1).all()


def test_e4m3fnuz_reaches_every_code_but_nan():
    codes = np.array([c for c in range(256) if c != 0x80], np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32)
    block = np.zeros((1, 256), np.float32)
    block[0, :255], block[0, 255] = values, 240.0
    block = block[:, np.argsort(np.abs(block[0]), kind="stable")]
    block[0, [0, 127]] = 240.0, 240.0  # gives both blocks scale 1
    got, scales = quantise_fp8(block, Tag.E4M3FNUZ)
    assert (scales == 1).all()
    np.testing.assert_array_equal(got.view(ml_dtypes.float8_e4m3fnuz).astype(np.float32), block)


@pytest.mark.parametrize("wire", ["exact", "fp8", "mxfp4"])
@pytest.mark.parametrize("fp8", ["e4m3fn", "e4m3fnuz"])
def test_rows_written_into_a_slot_are_read_back(wire, fp8):
    a2f, f2a = layouts(wire, "bfloat16", 8, 256, 2, fp8)
    x = torch.from_numpy(adversarial(8, 256, 4)).bfloat16()
    for layout in (a2f, f2a):
        view = SlotView(torch.zeros(layout.nbytes, dtype=torch.uint8), layout)
        payload, scales = encode(x[:5], layout.tag)
        assert payload.nbytes + (0 if scales is None else scales.nbytes) + 5 * 8 * layout.top_k == (
            layout.message_bytes(5)
        )
        view.payload[:5] = payload
        if scales is not None:
            view.scales[:5] = scales
        back = view.decode(5, torch.bfloat16)
        assert back.dtype == torch.bfloat16 and back.shape == (5, 256)
        error = (back.float() - x[:5].float()).abs().max(1).values
        assert (error <= x[:5].float().abs().max(1).values / 4 + 1e-38).all()


def test_bytes_per_token_at_hidden_7168():
    """MXFP4 out and FP8 back take 11,200 bytes instead of bfloat16's 28,672: 2.56 times less."""

    def round_trip(wire):
        return sum(layout.message_bytes(1) for layout in layouts(wire, "bfloat16", 1, 7168, 0))

    table = {wire: round_trip(wire) for wire in ("exact", "fp8", "mxfp4")}
    assert table == {"exact": 28672, "fp8": 7168 + 56 * 4 + 14336, "mxfp4": 11200}
    a2f, f2a = layouts("mxfp4", "bfloat16", 1, 7168, 0)
    assert (a2f.message_bytes(1), f2a.message_bytes(1)) == (3584 + 224, 7168 + 56 * 4)
    assert round(table["exact"] / table["mxfp4"], 2) == 2.56


def test_layout_parts_do_not_overlap_and_are_aligned():
    a2f, f2a = layouts("fp8", "bfloat16", 100, 7168, 8)
    assert a2f.tag == Tag.E4M3FN and f2a.tag == Tag.BFLOAT16
    ends = [
        (0, 100 * 7168),
        (a2f.scales_offset, 100 * 56 * 4),
        (a2f.ids_offset, 100 * 8 * 4),
        (a2f.weights_offset, 100 * 8 * 4),
    ]
    for (start, size), (next_start, _) in zip(ends, [*ends[1:], (a2f.nbytes, 0)], strict=True):
        assert start % 64 == 0 and start + size <= next_start
    assert a2f.message_bytes(1) == 7168 + 56 * 4 + 64
    assert f2a.message_bytes(1) == 7168 * 2


def test_unsupported_layouts_are_refused():
    with pytest.raises(ConfigError, match="divisible by 128, not 100"):
        layouts("fp8", "bfloat16", 8, 100, 2)
    with pytest.raises(ConfigError, match=r"unknown wire.format 'fp9'; use exact, fp8 or mxfp4"):
        layouts("fp9", "bfloat16", 8, 128, 2)
    with pytest.raises(ConfigError, match=r"unknown wire.fp8 'e5m2'; use e4m3fn or e4m3fnuz"):
        layouts("fp8", "bfloat16", 8, 128, 2, "e5m2")
    with pytest.raises(ConfigError, match="dtype int8"):
        layouts("exact", "int8", 8, 128, 2)
