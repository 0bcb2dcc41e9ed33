"""Slot layout and codecs: the torch codec equals the numpy reference bit for bit."""

import numpy as np
import pytest
import torch

from afd.errors import ConfigError
from afd.wire.codecs import dequantise_fp8, quantise_fp8
from afd.wire.codecs_torch import dequantise_fp8 as dequantise_torch
from afd.wire.codecs_torch import quantise_fp8 as quantise_torch
from afd.wire.layout import Tag, layouts


def adversarial(rows: int, hidden: int, seed: int) -> np.ndarray:
    """Normal rows with blocks of zeros, huge values, denormals and ties between two codes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, hidden)).astype(np.float32)
    x[0, :128] = 0
    x[1, :128] *= 1e30
    x[2, :128] *= 1e-38
    x[3, :128] = 448.0 * np.sign(x[3, :128])
    x[4, :128] = np.linspace(-448, 448, 128)
    x[5, 0] = 1e-45
    return x


@pytest.mark.parametrize("seed", range(5))
def test_torch_codec_equals_the_reference(seed):
    x = adversarial(8, 512, seed)
    codes, scales = quantise_fp8(x)
    codes_t, scales_t = quantise_torch(torch.from_numpy(x))
    np.testing.assert_array_equal(scales, scales_t.numpy())
    np.testing.assert_array_equal(codes, codes_t.view(torch.uint8).numpy())
    back = dequantise_torch(codes_t, scales_t, torch.float32).numpy()
    np.testing.assert_array_equal(dequantise_fp8(codes, scales), back)


def test_error_is_within_half_a_step_of_e4m3():
    x = adversarial(8, 512, 1)
    back = dequantise_fp8(*quantise_fp8(x)).astype(np.float64)
    block_max = np.abs(x.reshape(8, 4, 128)).max(-1).repeat(128, -1).reshape(8, 512)
    # Half a unit in the last of 3 mantissa bits, or half the smallest denormal (2^-9) of the block.
    bound = np.maximum(np.abs(x.astype(np.float64)) * 2**-4, block_max / 448 * 2**-10) * 1.0001
    assert (np.abs(back - x) <= bound + 1e-45).all()


def test_nan_and_infinity_surface():
    x = np.ones((2, 256), np.float32)
    x[0, 3], x[1, 200] = np.nan, np.inf
    back = dequantise_fp8(*quantise_fp8(x))
    assert np.isnan(back[0, :128]).all() and np.isnan(back[1, 128:]).all()
    assert (back[0, 128:] == 1).all() and (back[1, :128] == 1).all()
    torch_back = dequantise_torch(*quantise_torch(torch.from_numpy(x)), torch.float32).numpy()
    np.testing.assert_array_equal(np.isnan(back), np.isnan(torch_back))


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


def test_layout_refuses_what_it_cannot_carry():
    with pytest.raises(ConfigError, match="divisible by 128, not 100"):
        layouts("fp8", "bfloat16", 8, 100, 2)
    with pytest.raises(ConfigError, match=r"unknown wire.format 'fp9'; use exact or fp8"):
        layouts("fp9", "bfloat16", 8, 128, 2)
    with pytest.raises(ConfigError, match="dtype int8"):
        layouts("exact", "int8", 8, 128, 2)
