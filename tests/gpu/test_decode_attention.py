"""The decode kernels on a GPU, compared with their float32 reference."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from attention_worker.kernels.decode_attention import (  # noqa: E402
    decode_attention,
    reference_decode_attention,
)
from attention_worker.kernels.decode_plan import plan_decode  # noqa: E402

pytestmark = pytest.mark.gpu
NEWER = torch.version.hip is None or "gfx942" not in (
    torch.cuda.get_device_properties(0).gcnArchName
)
FP8 = torch.float8_e4m3fn if NEWER else torch.float8_e4m3fnuz
BF16, FP16 = torch.bfloat16, torch.float16
SCALES = (0.5, 0.75, 1.5)


class Case:
    """A cache of random pages, requests on it, and a check of the kernels' results."""

    def __init__(self, dtype, heads, kv_heads, dim, page, packed, lengths):
        def draw(*shape):
            return torch.randn(shape, generator=generator, device="cuda").to(dtype)

        generator = torch.Generator("cuda").manual_seed(0)
        requests, pages, room = len(lengths), 40, 200
        self.cache = draw(2, room, page, kv_heads, dim)
        if packed:  # vLLM's layout: a token's key and value are adjacent
            self.cache = draw(room, page, kv_heads, 2 * dim)
        self.keys, self.values = self.cache.split(dim, -1) if packed else self.cache.unbind()
        self.q = draw(requests, heads, dim)
        self.table = torch.randint(
            room, (requests, pages), generator=generator, device="cuda", dtype=torch.int32
        )
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.scales = [torch.tensor(s, device="cuda") for s in SCALES]
        self.out = torch.full((requests, heads, dim), 7.0, dtype=BF16, device="cuda")
        hip = torch.version.hip is not None
        group = heads // kv_heads
        self.plan = plan_decode(requests, kv_heads, group, dim, dtype.itemsize, 132, hip)

    def run(self, splits: int = 0):
        plan = replace(self.plan, splits=splits or self.plan.splits)
        scale = self.q.shape[-1] ** -0.5
        return decode_attention(
            self.q, self.keys, self.values, self.table, self.lengths, self.out, scale, plan,
            *self.scales,
        )  # fmt: skip

    def check(self):
        scales = SCALES if self.q.dtype == FP8 else (1.0, 1.0, 1.0)
        want = reference_decode_attention(
            self.q, self.keys, self.values, self.table, self.lengths, self.q.shape[-1] ** -0.5,
            *scales,
        )  # fmt: skip
        some = self.lengths > 0
        assert not self.out[~some].any()
        error = (self.out.float() - want)[some].flatten(1).norm(dim=1)
        assert (error / want[some].flatten(1).norm(dim=1)).max() < 0.005  # bfloat16's rounding


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "page", "packed"),
    [
        (FP8, 64, 1, 256, 64, False),
        (FP8, 64, 1, 256, 64, True),
        (FP8, 64, 1, 256, 16, True),
        (FP8, 64, 1, 256, 48, True),
        (FP8, 40, 1, 256, 128, True),
        (FP8, 128, 1, 64, 64, False),
        (FP8, 32, 4, 128, 16, True),
        (FP8, 24, 1, 128, 32, True),
        (BF16, 64, 1, 256, 64, True),
        (FP16, 24, 2, 64, 16, True),
    ],
)
def test_equals_the_reference(dtype, heads, kv_heads, dim, page, packed, splits):
    case = Case(dtype, heads, kv_heads, dim, page, packed, [600, 0, 1, 64, 333, 63, 65, 128])
    case.run(splits)
    case.check()


@pytest.mark.parametrize("splits", [1, 3])
def test_values_of_tokens_past_the_end_have_no_effect(splits):
    """Tokens past a request's end are NaN here, also in pages of other requests."""
    case = Case(FP8, 64, 1, 256, 64, True, [70, 130, 5])
    case.table[:] = torch.arange(120, device="cuda", dtype=torch.int32).view(3, 40)
    codes = case.cache.view(torch.uint8).view(-1, 2 * 256)  # one row per token
    past = torch.ones(len(codes), dtype=torch.bool, device="cuda")
    for request, length in enumerate(case.lengths.tolist()):
        past[request * 40 * 64 : request * 40 * 64 + length] = False
    codes[past] = 0x7F
    case.run(splits)
    case.check()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("which", ["keys", "values"])
def test_nan_propagates(which, splits):
    case = Case(FP8, 64, 1, 256, 64, False, [600, 600])
    page = int(case.table[1, 4])
    case.table[0, :] = (page + 1) % 200
    {"keys": case.keys, "values": case.values}[which][page, 3].view(torch.uint8).fill_(0x7F)
    case.run(splits)
    assert case.out[1].isnan().all() and not case.out[0].isnan().any()


def test_a_captured_graph_follows_lengths_and_pages():
    case = Case(FP8, 64, 1, 256, 64, True, [600, 1, 64, 333])
    case.run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.run()
    for lengths in ([0, 2, 2000, 63], [65, 64, 0, 1]):
        case.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        case.table.random_(0, 200)
        case.out.fill_(7.0)
        graph.replay()
        case.check()
