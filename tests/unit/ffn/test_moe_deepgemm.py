"""The DeepGEMM family of backends on fakes of library and kernels: results, selection, errors."""

import pytest

torch = pytest.importorskip("torch")

import fake_kernels  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from afd.wire.layout import Tag  # noqa: E402
from afd.wire.rows_torch import EncodedRows  # noqa: E402
from afd_bench.moe.layers import problem  # noqa: E402
from afd_bench.moe.shapes import SHAPES  # noqa: E402
from ffn_worker.moe import deep_gemm, device, grouped, grouped_plain, hopper  # noqa: E402
from ffn_worker.moe.base import MoeBackend  # noqa: E402
from ffn_worker.moe.batch_selection import Selection, SelectionByMode  # noqa: E402
from ffn_worker.moe.deep_gemm import (  # noqa: E402
    DeepGemmBackend,
    expected_rows,
    shared_multiprocessors,
    tile_rows,
)
from ffn_worker.moe.grouped import GroupedBackend  # noqa: E402
from ffn_worker.moe.hopper import HopperBackend  # noqa: E402
from ffn_worker.moe.load_counts import SlotLoad  # noqa: E402
from ffn_worker.moe.quantise import (  # noqa: E402
    Weight,
    dequantise_weight,
    in_scheme,
    widened,
)
from ffn_worker.moe.reference import ReferenceBackend  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402
from ffn_worker.moe.selection import choose_backend  # noqa: E402
from ffn_worker.moe.torch_grouped import TorchBackend  # noqa: E402
from ffn_worker.moe.triton import TritonBackend  # noqa: E402

EXPERTS, TOP_K, HIDDEN, WIDTH = 6, 3, 256, 256


def fp8(weight):
    return in_fp8(Weight.of(weight))


def in_fp8(weight):
    return in_scheme(weight, Scheme.FP8_BLOCK, Tag.E4M3FN, torch.bfloat16)


@pytest.fixture
def held(monkeypatch):
    fake_kernels.install(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU without files")
    monkeypatch.setattr(hopper, "VllmCudaBackend", ReferenceBackend)
    torch.manual_seed(0)
    w13 = torch.randn(EXPERTS, 2 * WIDTH, HIDDEN) / HIDDEN**0.5
    return fp8(w13), fp8(torch.randn(EXPERTS, HIDDEN, WIDTH) / WIDTH**0.5)


@pytest.fixture
def plain(held):
    return tuple(Weight.of(dequantise_weight(weight).bfloat16()) for weight in held)


def everywhere(choices):
    return SelectionByMode(choices, choices)


def batch(rows):
    torch.manual_seed(rows)
    ids = torch.rand(rows, EXPERTS).topk(TOP_K).indices.int()
    return torch.randn(rows, HIDDEN).bfloat16(), ids, torch.rand(rows, TOP_K)


def prepared(kind, held, experts=(0, EXPERTS)):
    backend = kind(experts, EXPERTS)
    backend.prepare(0, *(w[slice(*experts)] for w in held))
    return backend


def close(got, want, bound=0.1):
    assert got.dtype == torch.bfloat16
    error = (got.float() - want).abs().amax(1) / want.abs().amax(1).clamp(min=1e-20)
    assert error.max() <= bound


def exact(held, experts, rows, ids, scale):
    reference = prepared(ReferenceBackend, held, experts)
    return reference.forward(0, rows.decode(torch.float32), ids, scale)


@pytest.mark.parametrize("kind", [DeepGemmBackend, GroupedBackend])
@pytest.mark.parametrize("tag", [Tag.BFLOAT16, Tag.E4M3FN, Tag.E2M1])
@pytest.mark.parametrize("experts", [(0, EXPERTS), (2, 5)])
@pytest.mark.parametrize("rows", [1, 150])
def test_launches(held, rows, experts, tag, kind):
    x, ids, scale = batch(rows)
    ids[3::7] = -1
    scale[3::7] = torch.nan
    given = EncodedRows.of(x, tag)
    got = prepared(kind, held, experts).forward_encoded(0, given, ids, scale, torch.bfloat16)
    assert got.shape == (rows, HIDDEN) and (got[3::7] == 0).all()
    close(got, exact(held, experts, given, ids, scale.nan_to_num()))


@pytest.mark.parametrize("kind", [DeepGemmBackend, GroupedBackend])
@pytest.mark.parametrize("tag", [Tag.BFLOAT16, Tag.E4M3FN])
@pytest.mark.parametrize("experts", [(0, EXPERTS), (2, 5)])
def test_launches_of_bfloat16_weights(plain, experts, tag, kind):
    x, ids, scale = batch(150)
    ids[3::7] = -1
    scale[3::7] = torch.nan
    given = EncodedRows.of(x, tag)
    backend = prepared(kind, plain, experts)
    got = backend.forward_encoded(0, given, ids, scale, torch.bfloat16)
    assert (got[3::7] == 0).all()
    close(got, exact(plain, experts, given, ids, scale.nan_to_num()), 2**-6)


def test_no_rows(held):
    x, ids, scale = batch(0)
    assert prepared(DeepGemmBackend, held).forward(0, x, ids, scale).shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("kind", "narrow"),
    [(DeepGemmBackend, 80), (GroupedBackend, 80), (DeepGemmBackend, 384), (HopperBackend, 80)],
)
@pytest.mark.parametrize("rows", [1, 70])
def test_a_shared_expert_is_added_to_the_routed_ones(held, kind, narrow, rows):
    """The shared expert is narrower or wider than a routed one. This shard holds 2 of 6 experts; at
    70 rows each has 35 pairs, which selects DeepGEMM."""
    x, ids, scale = batch(rows)
    given = EncodedRows.of(x, Tag.E4M3FN)
    gate_up = Weight.of((torch.randn(2 * narrow, HIDDEN) / 16).bfloat16())
    down = Weight.of((torch.randn(HIDDEN, narrow) / narrow**0.5).bfloat16())
    backend, load = prepared(kind, held, (2, 4)), SlotLoad(range(2), 2, torch.device("cpu"))
    assert backend.prepare_shared(0, gate_up, down)
    got = backend.forward_encoded(0, given, ids, scale, torch.bfloat16, load)
    wide = [fp8(w.codes)[None] for w in widened(gate_up, down, -(-narrow // 128) * 128)]
    ones, zeros = torch.ones(rows, 1), torch.zeros(rows, 1, dtype=torch.int32)
    want = exact(held, (2, 4), given, ids, scale) + exact(wide, (0, 1), given, zeros, ones)
    close(got, want)
    assert load.added_to([0, 1]) == (int((ids == 2).sum()), 1 + int((ids == 3).sum()))


def test_a_shared_expert_beside_bfloat16_weights(plain):
    x, ids, scale = batch(70)
    backend = prepared(DeepGemmBackend, plain)
    assert backend.prepare_shared(0, *(weight[0] for weight in plain))
    every = torch.zeros(70, 1, dtype=torch.int32), torch.ones(70, 1)
    given = EncodedRows.of(x)
    want = exact(plain, (0, EXPERTS), given, ids, scale) + exact(plain, (0, 1), given, *every)
    close(backend.forward(0, x, ids, scale), want, 2**-6)


def test_triton_does_not_join_a_shared_expert_wider_than_the_routed_ones(held):
    down, gate_up = Weight.of(torch.zeros(HIDDEN, 384)), Weight.of(torch.zeros(768, HIDDEN))
    assert not prepared(HopperBackend, held).prepare_shared(0, gate_up, down)


def test_values_that_are_not_finite_make_only_their_row_nan(held):
    x, ids, scale = batch(9)
    x[4, 100] = torch.inf
    got = prepared(DeepGemmBackend, held).forward(0, x, ids, scale)
    assert got[4].isnan().all() and got.isnan().any(1).sum() == 1


@pytest.mark.parametrize(
    ("rows", "who"), [(20, "triton"), (40, "deep_gemm"), (41, "vllm_cuda"), (9000, "vllm_cuda")]
)
def test_backend_is_selected_by_rows(monkeypatch, held, rows, who):
    steps = (20, "triton"), (40, "deep_gemm"), (64, "vllm_cuda")
    name = f"h{HIDDEN}-w{WIDTH}-e{EXPERTS}of{EXPERTS}-k{TOP_K}-fp8_block"
    monkeypatch.setattr(hopper, "selection_of", lambda _: everywhere(Selection({name: steps})))
    backend, called = prepared(HopperBackend, held), []
    for name, kind in (("triton", TritonBackend), ("deep_gemm", DeepGemmBackend)):
        monkeypatch.setattr(kind, "_compute", lambda *_, name=name: called.append(name))
    monkeypatch.setattr(
        MoeBackend, "forward_encoded", lambda *_: called.append("vllm_cuda") or torch.empty(0)
    )
    x, ids, scale = batch(rows)
    backend.forward(0, x, ids, scale)
    assert called == [who]
    backend.release(0)


def test_backend_is_selected_by_launch_mode(monkeypatch, held):
    always = {
        name: Selection(schemes={"fp8_block": ((0, name),)}) for name in ("triton", "deep_gemm")
    }
    by_mode = SelectionByMode(graph=always["deep_gemm"], eager=always["triton"])
    monkeypatch.setattr(hopper, "selection_of", lambda _: by_mode)
    backend = prepared(HopperBackend, held)
    assert backend.chosen(0, 9, TOP_K) == "triton"
    with device.launched_as("graph"):
        assert backend.chosen(0, 9, TOP_K) == "deep_gemm"
    monkeypatch.setattr(device, "is_captured", lambda: True)
    assert backend.chosen(0, 9, TOP_K) == "deep_gemm"
    with device.launched_as("eager"):
        assert backend.chosen(0, 9, TOP_K) == "triton"


@pytest.mark.parametrize(("capturable", "modes"), [(True, ["eager", "graph"]), (False, ["eager"])])
def test_warm_up_also_covers_graphs(monkeypatch, capturable, modes):
    launched, forward = [], TorchBackend.forward
    monkeypatch.setattr(TorchBackend, "capturable", capturable)
    monkeypatch.setattr(
        TorchBackend,
        "forward",
        lambda *args: launched.append(device.launch_mode()) or forward(*args),
    )
    with problem(SHAPES["tiny"], torch.device("cpu"), cache_bytes=0) as given:
        given.ffn("torch").warm_up(4, Tag.BFLOAT16)
    assert launched == modes


@pytest.mark.parametrize("compiles", [True, False])
def test_grouped_kernels_are_used_if_they_compile(monkeypatch, held, plain, compiles):
    every = dict.fromkeys(("plain", "fp8_block"), ((0, "grouped"),))
    monkeypatch.setattr(hopper, "selection_of", lambda _: everywhere(Selection(schemes=every)))
    monkeypatch.setattr(hopper, "cannot_compile", lambda: None if compiles else "no NVRTC")
    called = []
    for where, name in ((grouped, "gate_up"), (grouped_plain, "gate_up"), (grouped_plain, "down")):
        ours = getattr(where, name)
        said = f"{where.__name__.split('.')[-1]}.{name}"
        monkeypatch.setattr(
            where, name, lambda *args, ours=ours, said=said: called.append(said) or ours(*args)
        )
    x, ids, scale = batch(70)
    given = EncodedRows.of(x, Tag.E4M3FN)
    for weights, bound in ((held, 0.1), (plain, 2**-6)):
        got = prepared(HopperBackend, weights).forward_encoded(0, given, ids, scale, torch.bfloat16)
        close(got, exact(weights, (0, EXPERTS), given, ids, scale), bound)
    ours = ["grouped.gate_up", "grouped_plain.gate_up", "grouped_plain.down"]
    assert called == (ours if compiles else [])


def test_rows_that_are_not_16_byte_aligned(monkeypatch, held):
    monkeypatch.setattr(grouped, "gate_up", None)
    x, ids, scale = batch(9)
    given = EncodedRows.of(x, Tag.E4M3FN)
    memory = torch.empty(given.payload.numel() + 16, dtype=torch.uint8)
    begin = 1 + -memory.data_ptr() % 16
    moved = memory[begin : begin + given.payload.numel()].view(given.payload.dtype)
    moved = moved.view(given.payload.shape).copy_(given.payload)
    shifted = EncodedRows(given.tag, moved, given.scales)
    got = prepared(GroupedBackend, held).forward_encoded(0, shifted, ids, scale, torch.bfloat16)
    close(got, exact(held, (0, EXPERTS), given, ids, scale))


def test_more_experts_than_the_kernel_supports(monkeypatch, held):
    monkeypatch.setattr(grouped.grouped, "most_experts", lambda: EXPERTS - 1)
    with pytest.raises(ConfigError, match="at most 5 experts of a layer, not 6; use more FFN"):
        prepared(GroupedBackend, held)
    every = Selection(schemes={"fp8_block": ((0, "grouped"),)})
    monkeypatch.setattr(hopper, "selection_of", lambda _: everywhere(every))
    monkeypatch.setattr(hopper, "cannot_compile", lambda: None)
    assert prepared(HopperBackend, held).chosen(0, 70, TOP_K) == "deep_gemm"
    assert prepared(HopperBackend, held, (1, 6)).chosen(0, 70, TOP_K) == "grouped"


def test_plain_weights_use_vllm_without_measurements(monkeypatch, plain):
    """vLLM's kernels compute plain weights, unless a shared expert joins the routed ones."""
    backend = prepared(HopperBackend, plain)
    x, ids, scale = batch(9)
    assert backend.chosen(0, 9000, TOP_K) == "vllm_cuda"
    close(
        backend.forward(0, x, ids, scale), exact(plain, (0, EXPERTS), EncodedRows.of(x), ids, scale)
    )
    assert backend.prepare_shared(0, *(weight[0] for weight in plain))
    assert backend.chosen(0, 9000, TOP_K) == "triton"
    assert not backend._vllm._weights  # otherwise the weights would be stored twice
    backend.release(0)


def test_tiles():
    assert [tile_rows(mean) for mean in (0.1, 64, 64.5, 4096)] == [64, 64, 128, 128]
    assert expected_rows(128, 128) == 256  # 1.5 tiles on average, rounded up to 2
    assert expected_rows(0.5, 64) == 64 and expected_rows(4096, 128) == 32 * 128
    assert [shared_multiprocessors(sms) for sms in (132, 114, 78, 2)] == [66, 56, 38, 2]


def test_unavailable_reasons_are_one_sentence(monkeypatch, tmp_path):
    def reason(dtype=torch.bfloat16, hidden=HIDDEN):
        return DeepGemmBackend.unavailable(dtype, hidden, WIDTH)

    monkeypatch.setattr(TritonBackend, "unavailable", lambda *_: "there is no GPU")
    assert reason() == "there is no GPU"
    monkeypatch.setattr(TritonBackend, "unavailable", lambda *_: None)
    monkeypatch.setattr(torch.version, "hip", None)
    capability = [10, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: tuple(capability))
    assert "run on NVIDIA Hopper" in reason()
    capability[0] = 9
    assert "bfloat16, not torch.float16" in reason(torch.float16)
    assert "multiples of 128, not 192 and 256" in reason(hidden=192)
    package = tmp_path / "vllm/__init__.py"
    (tmp_path / "vllm").mkdir()
    package.touch()
    spec = deep_gemm.importlib.util.spec_from_file_location("vllm", package)
    monkeypatch.setattr(deep_gemm.importlib.util, "find_spec", lambda _: None)
    assert "vllm, which brings DeepGEMM, is not installed" in reason()
    monkeypatch.setattr(deep_gemm.importlib.util, "find_spec", lambda _: spec)
    assert "no DeepGEMM with its headers" in reason()
    (tmp_path / "vllm/third_party/deep_gemm/include/deep_gemm").mkdir(parents=True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.delenv("DG_JIT_NVCC_COMPILER", raising=False)
    monkeypatch.delenv("DG_JIT_USE_NVRTC", raising=False)
    assert f"no compiler at {tmp_path}/cuda/bin/nvcc; set CUDA_HOME" in reason()
    fake_kernels.allow_cpu(monkeypatch, "deep_gemm")
    with pytest.raises(
        ConfigError, match="backend deep_gemm cannot run: DeepGEMM finds no compiler"
    ):
        choose_backend("deep_gemm", torch.bfloat16, HIDDEN, WIDTH, scheme=Scheme.FP8_BLOCK)
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    assert reason() is None
