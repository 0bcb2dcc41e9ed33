"""Codec kernels on a GPU give the same bytes as the references."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire import codecs_gpu_torch as gpu  # noqa: E402
from afd.wire import codecs_torch as cpu  # noqa: E402
from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from ffn_worker.allreduce import formats_gpu, formats_numpy, formats_table  # noqa: E402

pytestmark = pytest.mark.gpu
TAG = (
    Tag.E4M3FNUZ
    if torch.version.hip and "gfx942" in (torch.cuda.get_device_properties(0).gcnArchName)
    else Tag.E4M3FN
)


def rows(count: int, hidden: int) -> torch.Tensor:
    torch.manual_seed(0)
    x = torch.randn(count, hidden)
    x[0, :128], x[1, :128] = 0, 1e30
    x[2, :128] *= 1e-38
    return x.bfloat16()


@pytest.mark.parametrize("hidden", [128, 2048, 7168])
def test_fp8(hidden):
    x = rows(37, hidden)
    codes, scales = gpu.quantise_fp8(x.cuda(), TAG)
    want, want_scales = cpu.quantise_fp8(x, TAG)
    assert torch.equal(scales.cpu(), want_scales)
    assert torch.equal(codes.cpu().view(torch.uint8), want.view(torch.uint8))
    back = gpu.dequantise_fp8(codes, scales, torch.bfloat16)
    assert torch.equal(back.cpu(), cpu.dequantise_fp8(want, want_scales, torch.bfloat16))


@pytest.mark.parametrize("hidden", [128, 2048, 7168])
def test_mxfp4(hidden):
    x = rows(37, hidden)
    codes, scales = gpu.quantise_mxfp4(x.cuda())
    want, want_scales = cpu.quantise_mxfp4(x)
    assert torch.equal(scales.cpu(), want_scales) and torch.equal(codes.cpu(), want)
    back = gpu.dequantise_mxfp4(codes, scales, torch.bfloat16)
    assert torch.equal(back.cpu(), cpu.dequantise_mxfp4(want, want_scales, torch.bfloat16))


@pytest.mark.parametrize("tag", [TAG, Tag.E2M1])
def test_encoded_rows_use_the_kernels_on_a_gpu(tag):
    x = rows(5, 256)
    there, here = EncodedRows.of(x.cuda(), tag), EncodedRows.of(x, tag)
    assert torch.equal(there.payload.cpu().view(torch.uint8), here.payload.view(torch.uint8))
    assert torch.equal(there.decode(torch.float32).cpu(), here.decode(torch.float32))
    eager = EncodedRows.of(there.decode(torch.bfloat16), tag)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the codecs of both formats can be captured
        again = EncodedRows.of(there.decode(torch.bfloat16), tag)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again.payload.view(torch.uint8), eager.payload.view(torch.uint8))


def test_nan_propagates():
    x = rows(4, 256)
    x[3, 200] = torch.nan
    back = gpu.dequantise_fp8(*gpu.quantise_fp8(x.cuda(), TAG), torch.bfloat16)
    assert back[3, 128:].isnan().all() and not back[3, :128].isnan().any()
    back = gpu.dequantise_mxfp4(*gpu.quantise_mxfp4(x.cuda()), torch.bfloat16)
    assert back[3, 192:224].isnan().all() and not back[3, :192].isnan().any()


@pytest.mark.parametrize("fmt", formats_table.FORMATS.values(), ids=lambda f: f.name)
def test_reduce_formats(fmt):
    x = np.random.default_rng(0).standard_normal((4, 5000)).astype(np.float16)
    padded = np.pad(x, ((0, 0), (0, -5000 % formats_table.ATOM_VALUES)))
    want = np.stack([formats_numpy.encode(row, fmt) for row in padded])
    data = torch.stack([formats_gpu.encode(torch.from_numpy(row).cuda(), fmt) for row in x])
    np.testing.assert_array_equal(data.cpu().numpy(), want)
    got = formats_gpu.decode(data[1], 5000, fmt, torch.float16).cpu().numpy()
    np.testing.assert_array_equal(got, formats_numpy.decode(want[1], fmt)[:5000])
    got = formats_gpu.decode_sum(data, 5000, fmt).cpu().numpy()
    np.testing.assert_array_equal(got, formats_numpy.decode_sum(want, fmt)[:5000])
