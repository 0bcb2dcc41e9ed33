"""The emulator's arithmetic and operand rules, compared with slow, simple implementations."""

from fractions import Fraction

import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from emulator.alu import (
    OPERATIONS,
    div_fixup32,
    div_fmas32,
    div_scale32,
    fma32,
)
from emulator.machine import Kernel
from emulator.operands import dpp_lanes
from emulator.scalar import _ALU as SCALAR
from emulator.state import Memory, MemoryFault, bits_to_mask, mask_to_bits

rng = np.random.default_rng(11)


def floats(count: int, low: int = -140, high: int = 120) -> np.ndarray:
    """Returns float32 values over many octaves, both signs, including denormals."""
    mantissa = rng.integers(1 << 23, 1 << 24, count).astype(np.float64)
    scale = np.exp2(rng.integers(low, high, count) - 23.0)
    return (mantissa * scale * rng.choice([-1, 1], count)).astype(np.float32)


def nearest(exact: Fraction) -> np.float32:
    """Returns the float32 nearest to an exact value, ties to even."""
    guess = np.float32(float(exact))
    around = [np.nextafter(guess, np.float32(s * np.inf)) for s in (-1, 1)]
    finite = [c for c in (guess, *around) if np.isfinite(c)]
    best = min(abs(Fraction(float(c)) - exact) for c in finite)
    tied = [c for c in finite if abs(Fraction(float(c)) - exact) == best]
    return next(c for c in tied if len(set(map(float, tied))) == 1 or c.view(np.uint32) % 2 == 0)


def test_fma_rounds_once():
    a, b = floats(600, -60, 60), floats(600, -60, 60)
    c = floats(600, -100, 100)
    c[:200] = -(a[:200] * b[:200])  # cancels to the rounding error of the product
    c[200:300] = (a[200:300] * b[200:300] * 2.0**-24).astype(np.float32)  # near ties
    got = fma32(a, b, c)
    for i in range(600):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        assert got[i] == nearest(exact), i


def test_the_division_sequence_divides_correctly():
    """Compilers emit this sequence for a correctly rounded quotient: scale, refine, undo the scale,
    fix special cases. It also works with a reciprocal that is off by one unit in the last place."""
    special = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1, 1e-45, -1e-40, 3e38, 2**-126])
    x = np.concatenate([floats(4000), np.repeat(special, 10), floats(54)])
    y = np.concatenate([floats(4000), np.tile(special, 10), floats(54)])
    pairs = zip(np.split(x[:4096], 64), np.split(y[:4096], 64), strict=True)
    with np.errstate(all="ignore"):
        for n, d in pairs:
            dd, _ = div_scale32(d, d, n)
            nn, flag = div_scale32(n, d, n)
            r = np.nextafter((1 / dd.astype(np.float64)).astype(np.float32), np.float32(0))
            r = fma32(fma32(-dd, r, np.float32(1)), r, r)
            q = nn * r
            q = fma32(fma32(-dd, q, nn), r, q)
            got = div_fixup32(div_fmas32(fma32(-dd, q, nn), r, q, flag), d, n)
            want = (n.astype(np.float64) / d.astype(np.float64)).astype(np.float32)
            np.testing.assert_array_equal(got, want)


def test_byte_permutation():
    a, b = rng.integers(0, 1 << 32, (2, 64), dtype=np.uint32)
    selectors = rng.integers(0, 16, (64, 4))
    packed = sum(selectors[:, i].astype(np.uint32) << np.uint32(8 * i) for i in range(4))
    got = OPERATIONS["V_PERM_B32"].function(a, b, packed)
    for lane in range(64):
        data = int(a[lane]) << 32 | int(b[lane])
        for i in range(4):
            s = int(selectors[lane, i])
            if s < 8:
                want = data >> 8 * s & 255
            elif s < 12:
                want = 255 if data >> (16 * (s - 8) + 15) & 1 else 0
            else:
                want = 0 if s == 12 else 255
            assert int(got[lane]) >> 8 * i & 255 == want


@pytest.mark.parametrize("name", ["V_BFE_U32", "V_BFE_I32"])
def test_bit_fields(name):
    operation = OPERATIONS[name]
    x = rng.integers(0, 1 << 32, 64, dtype=np.uint32)
    offset, width = rng.integers(0, 32, (2, 64), dtype=np.uint32)
    got = operation.function(x.view(np.int32) if name.endswith("I32") else x, offset, width)
    for lane in range(64):
        field = int(x[lane]) >> int(offset[lane]) & ((1 << int(width[lane])) - 1)
        if name.endswith("I32"):
            source = int(x.view(np.int32)[lane]) >> int(offset[lane])
            field = source & ((1 << int(width[lane])) - 1)
            if width[lane] and field >> (int(width[lane]) - 1):
                field -= 1 << int(width[lane])
        assert int(got[lane]) == field


def test_cross_lane_moves():
    lanes, exists = dpp_lanes(0b00_01_10_11)  # quad_perm [3, 2, 1, 0]
    assert lanes[:8].tolist() == [3, 2, 1, 0, 7, 6, 5, 4] and exists.all()
    lanes, exists = dpp_lanes(0x128)  # row_ror:8
    assert lanes[:16].tolist() == [*range(8, 16), *range(8)] and exists.all()
    lanes, exists = dpp_lanes(0x141)  # row_half_mirror
    assert lanes[:16].tolist() == [*range(7, -1, -1), *range(15, 7, -1)]
    lanes, exists = dpp_lanes(0x111)  # row_shr:1
    assert not exists[16] and lanes[17] == 16


def test_scalar_carry_and_overflow():
    assert SCALAR["S_ADD_U32"](0xFFFFFFFF, 2, 0) == (0x100000001, 1)
    assert SCALAR["S_ADDC_U32"](0xFFFFFFFF, 0, 1)[1] == 1
    assert SCALAR["S_ADD_I32"](0x7FFFFFFF, 1, 0)[1] == 1
    assert SCALAR["S_SUB_I32"](0, 1, 0)[1] == 0
    assert SCALAR["S_MUL_HI_I32"](0xFFFFFFFF, 5, 0)[0] == -1


def test_masks_and_memory():
    mask = rng.random(64) < 0.5
    np.testing.assert_array_equal(bits_to_mask(mask_to_bits(mask)), mask)
    memory = Memory(1 << 16)
    data = np.arange(10, dtype=np.float32)
    at = memory.put(data)
    np.testing.assert_array_equal(memory.get(at, data), data)
    assert memory.load(np.array([at + 4]), 4).view(np.float32)[0, 0] == 1
    for bad in (at - 1, at + 37, at + (1 << 20), 0):
        with pytest.raises(MemoryFault):
            memory.load(np.array([bad]), 4)


def test_a_file_that_is_not_a_code_object():
    with pytest.raises(ValueError, match="not an ELF file"):
        Kernel(b"\0" * 100, "kernel", "gfx950")
