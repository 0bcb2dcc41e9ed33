"""Rung 5: the codec kernels run on the emulator and give the same bytes as the references."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("tinygrad", reason="tinygrad is not installed here; ./run test-amd")

from emulator import alu
from emulator.state import MemoryFault
from kernel_run import Runner

from afd.wire import codecs
from afd.wire.layout import Tag
from ffn_worker.allreduce import formats_numpy, formats_table

ARCHS = ["gfx942", "gfx950"]
FP8 = {"fp8e4nv": Tag.E4M3FN, "fp8e4b8": Tag.E4M3FNUZ}
FORMATS = list(formats_table.FORMATS.values())


@pytest.fixture(params=ARCHS)
def runner(request, compiled) -> Runner:
    return Runner(compiled, request.param)


def rows(count: int, hidden: int, *, broken: bool) -> np.ndarray:
    """Returns bfloat16 rows with zero, huge and denormal blocks, ties, NaN and infinity."""
    x = np.random.default_rng(7).standard_normal((count, hidden)).astype(np.float32)
    x[0, :128] = 0
    x[0, 128:256] = np.arange(-64, 64) / 16
    x[1, :128] *= 1e30
    x[1, 128:256] *= 1e-38
    if broken:
        x[2, 5], x[2, 300] = np.nan, -np.inf
    return x.astype(ml_dtypes.bfloat16)


def same_bits(got: np.ndarray, want: np.ndarray) -> bool:
    """Returns whether all bits are equal; any NaN equals any other NaN."""
    nan = np.isnan(want.astype(np.float32))
    unsigned = {2: np.uint16, 4: np.uint32}[want.itemsize]
    return bool(
        (np.isnan(got.astype(np.float32)) == nan).all()
        and (got.view(unsigned) == want.view(unsigned))[~nan].all()
    )


@pytest.mark.parametrize("fp8", FP8)
def test_quantise_fp8(runner, fp8):
    x = rows(3, 512, broken=True)
    want, want_scales = codecs.quantise_fp8(x.astype(np.float32), FP8[fp8])
    outputs = [np.zeros((3, 512), np.uint8), np.zeros((3, 4), np.float32)]
    scalars = [("i", 512), ("i", 512)]
    got, scales = runner(f"quantise_fp8[{fp8}]", [x], outputs, scalars, (3, 1))
    assert same_bits(scales, want_scales)
    finite = ~np.isnan(want_scales).repeat(128, axis=1)
    np.testing.assert_array_equal(got[finite], want[finite])
    assert np.isnan(codecs.dequantise_fp8(got, scales, FP8[fp8])[~finite]).all()


@pytest.mark.parametrize("fp8", FP8)
def test_dequantise_fp8(runner, fp8):
    codes, scales = codecs.quantise_fp8(rows(3, 512, broken=True).astype(np.float32), FP8[fp8])
    want = codecs.dequantise_fp8(codes, scales, FP8[fp8]).astype(ml_dtypes.bfloat16)
    outputs = [np.zeros_like(want)]
    (got,) = runner(f"dequantise_fp8[{fp8}]", [codes, scales], outputs, [("i", 512)], (3, 1))
    assert same_bits(got, want)


def test_quantise_mxfp4(runner):
    x = rows(3, 1024, broken=True)
    want, want_scales = codecs.quantise_mxfp4(x.astype(np.float32))
    outputs = [np.zeros_like(want), np.zeros_like(want_scales)]
    scalars = [("i", 1024), ("i", 1024)]
    got, scales = runner("quantise_mxfp4", [x], outputs, scalars, (3, 1))
    np.testing.assert_array_equal(scales, want_scales)
    np.testing.assert_array_equal(got, want)


def test_dequantise_mxfp4(runner):
    codes, scales = codecs.quantise_mxfp4(rows(3, 1024, broken=True).astype(np.float32))
    want = codecs.dequantise_mxfp4(codes, scales).astype(ml_dtypes.bfloat16)
    scalars = [("i", 1024)]
    (got,) = runner("dequantise_mxfp4", [codes, scales], [np.zeros_like(want)], scalars, (3, 1))
    assert same_bits(got, want)


def partials() -> np.ndarray:
    """Returns float16 [4 ranks, 4096] with zero, tiny and denormal blocks, blocks near float16's
    largest value, and NaN."""
    x = np.random.default_rng(3).standard_normal((4, 4096))
    x[:, :64] = 0
    x[:, 64:128] *= 2e-5
    x[:, 128:192] *= 3e-7
    x[:, 192:256] *= 15000
    x = x.astype(np.float16)
    x[1, 300], x[2, 400] = np.nan, np.inf
    return x


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_encode(runner, fmt):
    for x in partials()[:3]:
        want = formats_numpy.encode(x, fmt)
        outputs = [np.zeros_like(want)]
        (got,) = runner(f"encode[{fmt.name}]", [x], outputs, [("i", 4096)], (2,))
        scale_at = fmt.code_bytes
        np.testing.assert_array_equal(got[:, :scale_at], want[:, :scale_at])
        got_scales, want_scales = (
            np.ascontiguousarray(d[:, scale_at:]).view(np.float16) for d in (got, want)
        )
        assert same_bits(got_scales, want_scales)


@pytest.mark.parametrize("ulps", [-1, 1])
def test_encoded_bytes_do_not_depend_on_the_reciprocal(compiled, monkeypatch, ulps):
    """v_rcp_f32 may be off by one unit in the last place."""
    right = alu.OPERATIONS["V_RCP_F32"]

    def off(x: np.ndarray) -> np.ndarray:
        inverse = right.function(x)
        return np.where(
            np.isfinite(inverse), (inverse.view(np.int32) + ulps).view(np.float32), inverse
        )

    monkeypatch.setitem(alu.OPERATIONS, "V_RCP_F32", replace(right, function=off))
    x = partials()[0]
    want = formats_numpy.encode(x, formats_table.INT8)
    (got,) = Runner(compiled, "gfx950")("encode[int8]", [x], [want * 0], [("i", 4096)], (2,))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_decode(runner, fmt):
    data = formats_numpy.encode(partials()[1], fmt)
    outputs = [np.zeros(4096, np.float16)]
    (got,) = runner(f"decode[{fmt.name}]", [data], outputs, [("i", 4096)], (2,))
    assert same_bits(got, formats_numpy.decode(data, fmt))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
def test_decode_sum(runner, fmt):
    data = np.stack([formats_numpy.encode(x, fmt) for x in partials()])
    outputs = [np.zeros(4096, np.float16)]
    scalars = [("i", 4096), ("l", data[0].nbytes)]
    (got,) = runner(f"decode_sum[{fmt.name}]", [data], outputs, scalars, (2,))
    assert same_bits(got, formats_numpy.decode_sum(data, fmt))


# Negative controls: errors that the checks above must detect.


def test_the_wrong_fp8_format_is_detected(compiled):
    """CDNA4 code emulated as CDNA3, whose FP8 instructions use another format."""
    x = rows(3, 512, broken=False)
    want, _ = codecs.quantise_fp8(x.astype(np.float32), Tag.E4M3FN)
    runner = Runner(compiled, "gfx950", runs_as="gfx942")
    outputs = [np.zeros_like(want), np.zeros((3, 4), np.float32)]
    scalars = [("i", 512), ("i", 512)]
    got, _ = runner("quantise_fp8[fp8e4nv]", [x], outputs, scalars, (3, 1))
    assert (got != want).mean() > 0.5


def test_the_wrong_format_is_detected(runner):
    fmt = formats_table.INT4
    data = formats_numpy.encode(partials()[0], fmt)
    outputs = [np.zeros(4096, np.float16)]
    (got,) = runner("decode[fp4]", [data], outputs, [("i", 4096)], (2,))
    assert not same_bits(got, formats_numpy.decode(data, fmt))


def test_an_access_beyond_a_buffer_is_an_error(runner):
    x = partials()[0]
    outputs = [
        np.zeros((1, formats_table.INT4.atom_bytes), np.uint8)
    ]  # one atom; the kernel writes two
    with pytest.raises(MemoryFault, match="outside of every buffer"):
        runner("encode[int4]", [x], outputs, [("i", 4096)], (2,))


def test_changed_machine_code_is_detected(compiled):
    """The encoder's constant 1.5 * 2^10 + 8 is lowered by one unit, so all codes shift."""
    code = compiled("gfx950").code("encode[int4]")
    rounder = np.full(2, 1544, np.float16).tobytes()
    assert rounder in code
    changed = code.replace(rounder, np.full(2, 1543, np.float16).tobytes())
    x = partials()[0]
    want = formats_numpy.encode(x, formats_table.INT4)
    arrays, scalars = [x, np.zeros_like(want)], [("i", 4096)]
    runner = Runner(compiled, "gfx950")
    (got,) = runner.in_order("encode[int4]", arrays, [1], scalars, (2,), code=changed)
    assert (got != want).mean() > 0.5
