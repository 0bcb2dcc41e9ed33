"""vLLM's fused experts on a GPU, plain and FP8-block, compared with the reference; the bench."""

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from afd.wire.layout import Tag  # noqa: E402
from afd_bench.moe import run as bench  # noqa: E402
from afd_bench.moe.cli import main  # noqa: E402
from ffn_worker.moe.pairs import masked_pairs, masked_pairs_on_gpu  # noqa: E402
from ffn_worker.moe.quantise import Weight, in_scheme  # noqa: E402
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.tiles import read_buckets  # noqa: E402
from ffn_worker.moe.vllm_cuda import VllmCudaBackend  # noqa: E402

pytestmark = pytest.mark.gpu
EXPERTS, TOP_K, HIDDEN, WIDTH = 16, 4, 512, 384


@pytest.mark.parametrize("experts", [(0, EXPERTS), (5, 9)])
@pytest.mark.parametrize("scheme", [Scheme.PLAIN, Scheme.FP8_BLOCK])
def test_fused_experts(scheme, experts):
    pytest.importorskip("vllm")
    torch.manual_seed(0)
    shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    held = [
        in_scheme(
            Weight.of((torch.randn(s) / s[2] ** 0.5).bfloat16()[slice(*experts)]),
            scheme,
            Tag.E4M3FN,
            torch.bfloat16,
        )
        for s in shapes
    ]
    x = torch.randn(65, HIDDEN).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(65)]).int()
    ids[3] = ids[40, 1] = -1
    scale = torch.rand(65, TOP_K)
    scale[3] = torch.nan  # a padding row of a captured graph
    reference = ReferenceBackend(experts, EXPERTS)
    reference.prepare(0, *held)
    want = reference.forward(0, x.float(), ids, scale)
    backend = VllmCudaBackend(experts, EXPERTS)
    backend.prepare(0, *(w.to(torch.device("cuda")) for w in held))
    got = backend.forward(0, x.cuda(), ids.cuda(), scale.cuda()).float().cpu()
    assert (got - want).abs().max() <= (2**-6, 0.06)[scheme is Scheme.FP8_BLOCK] * want.abs().max()


@pytest.mark.parametrize("rows", [1, 65, 700])
@pytest.mark.parametrize(("experts", "other"), [((0, EXPERTS), 0), ((5, 9), 4)])
def test_masked_pairs(experts, other, rows):
    ids = torch.randint(-1, EXPERTS, (rows, TOP_K), dtype=torch.int32)
    scale = torch.rand(rows, TOP_K)
    want = masked_pairs(ids, scale, *experts, other)
    got = masked_pairs_on_gpu(ids.cuda(), scale.cuda(), *experts, other)
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, want, strict=True))


def test_the_bench_tunes_and_measures(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "FOLDER", tmp_path)
    argv = ["--shapes", "tiny", "--rows", "64", "--tune", "--seconds", "60"]
    assert main([*argv, "--out", str(tmp_path / "moe.json")]) == 0
    files = list(tmp_path.glob("*/*.json"))
    assert len(files) == 6 and all(read_buckets(file) for file in files)
