"""Which MoE and reduce backends an AMD GPU gets. No AMD GPU and no ROCm needed."""

import json

import pytest

torch = pytest.importorskip("torch")

from afd.config.choices import choices  # noqa: E402
from afd.config.deployment import Deployment  # noqa: E402
from afd.errors import ConfigError  # noqa: E402
from ffn_worker.allreduce.registry import BACKENDS as REDUCERS  # noqa: E402
from ffn_worker.moe import selection  # noqa: E402
from ffn_worker.moe.device import FP8_OF_ARCH, device_kind  # noqa: E402
from ffn_worker.moe.instinct import FOLDER, order_of  # noqa: E402
from ffn_worker.moe.registry import BACKENDS  # noqa: E402
from ffn_worker.moe.scheme import Scheme  # noqa: E402

GPU = torch.device("cuda", 0)


@pytest.fixture
def instinct(monkeypatch):
    """Makes torch look like a ROCm build on this architecture, with these packages."""

    def look_like(arch, missing=()):
        monkeypatch.setattr(torch.version, "hip", "7.0")
        monkeypatch.setattr(selection, "architecture", lambda: arch)
        for name in ("aiter", "triton"):
            kind = BACKENDS[name].load()
            reason = "not installed" if name in missing else None
            monkeypatch.setattr(kind, "unavailable", staticmethod(lambda *_, r=reason: r))

    return look_like


@pytest.mark.parametrize("arch", FP8_OF_ARCH)
def test_every_architecture_has_an_order_and_says_that_it_is_unmeasured(arch):
    order = order_of(arch)
    assert order.arch == arch and order.measured is False
    for scheme in Scheme:
        names = order.of(scheme.value)
        assert names[-1] == "torch" and "triton" in names
        for name in names:
            devices, schemes = BACKENDS[name].devices, BACKENDS[name].schemes
            assert (not devices or "rocm" in devices) and scheme in schemes


def test_aiter_comes_first_and_triton_behind_it(instinct):
    for arch, scheme, wanted in (
        ("gfx942", Scheme.PLAIN, "aiter"),
        ("gfx942", Scheme.FP8_BLOCK, "aiter"),
        ("gfx942", Scheme.MXFP4, "triton"),  # AITER has no FP4 kernel there
        ("gfx950", Scheme.MXFP4, "aiter"),
    ):
        instinct(arch)
        chosen = selection.choose_backend("auto", torch.bfloat16, 256, 256, GPU, scheme)
        assert chosen == wanted
    instinct("gfx950", missing=("aiter",))
    args = (torch.bfloat16, 256, 256, GPU, Scheme.FP8_BLOCK)
    assert selection.choose_backend("auto", *args) == "triton"
    instinct("gfx950", missing=("aiter", "triton"))
    assert selection.choose_backend("auto", *args) == "torch"
    with pytest.raises(ConfigError, match="hopper cannot run: it runs on cuda, not on rocm"):
        selection.choose_backend("hopper", *args)


def test_a_measured_crossover_moves_small_steps_to_triton(tmp_path):
    data = json.loads((FOLDER / "gfx950.json").read_text())
    data["triton_below_pairs"]["plain"] = 4.0
    (tmp_path / "gfx950.json").write_text(json.dumps(data))
    order = order_of("gfx950", tmp_path)
    assert order.of("plain", 3.9)[0] == "triton" and order.of("plain", 4.0)[0] == "aiter"
    assert order.of("plain")[0] == "aiter"
    with pytest.raises(ConfigError, match="knows the AMD architectures gfx950, not gfx90a"):
        order_of("gfx90a", tmp_path)
    (tmp_path / "gfx942.json").write_text("{}")
    with pytest.raises(ConfigError, match="is damaged"):
        order_of("gfx942", tmp_path)


def test_torch_calls_rocm_cuda_and_we_do_not(monkeypatch):
    assert device_kind(GPU) == "cuda" and device_kind(torch.device("cpu")) == "cpu"
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert device_kind(GPU) == "rocm" and device_kind(torch.device("cpu")) == "cpu"


def made(device, **ffn):
    sides = {"attention": {"device": device}, "ffn": {"device": device, **ffn}}
    return Deployment.from_plain({"model": "m", **sides})


def test_the_reduce_backend_can_be_chosen_in_the_deployment_file():
    assert set(choices("reduce_backend")) == {"auto", *REDUCERS}
    rocm = made("rocm", tp=2, reduce="int4", reduce_backend="aiter_quickreduce")
    assert rocm.ffn.reduce_backend == "aiter_quickreduce"
    assert made("rocm", tp=2, reduce="fp4", reduce_backend="quickreduce").ffn.reduce == "fp4"
    with pytest.raises(ValueError, match="reduce_backend aiter_quickreduce runs on device rocm"):
        made("cuda", tp=2, reduce_backend="aiter_quickreduce")
    with pytest.raises(ValueError, match="reduce_backend gloo runs on device cpu"):
        made("rocm", tp=2, reduce_backend="gloo")
    with pytest.raises(ValueError, match="needs several ranks to add up, but tp is 1"):
        made("rocm", reduce_backend="nccl")
