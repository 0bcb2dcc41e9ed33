"""Device rocm: visible GPUs, the FP8 type of the wire, refusals. No AMD GPU and no ROCm needed."""

import msgspec
import pytest

from afd.config.deployment import Deployment
from afd.config.resolve import region_options, resolve, wire_fp8
from afd.config.roles import RoleSpec
from afd.devices import ROCM, device_named, device_of_region, device_of_torch
from afd.devices.rocm import FP8_OF_ARCH
from afd.errors import ConfigError
from afd.host.amd_gpus import architectures, rocm_version
from afd.topology import visible_gpus
from afd_launch import gpus
from afd_launch.seen_gpus import BAD_GRAPHS, check_graphs, needs_pool, with_architecture
from attention_worker.rocm import attention_backend, switches


def on_rocm(checkpoint="m", **sections) -> Deployment:
    for role in ("attention", "ffn"):
        sections[role] = {"device": "rocm", **sections.get(role, {})}
    return Deployment.from_plain({"model": str(checkpoint), "served_model_name": "m", **sections})


def kfd(folder, *versions):
    """The driver's folder of nodes, with one version of LLVM's target each; 0: a CPU."""
    for node, version in enumerate(versions):
        (folder / str(node)).mkdir()
        text = f"cpu_cores_count 1\nsimd_count 304\ngfx_target_version {version}\n"
        (folder / str(node) / "properties").write_text(text)
    return folder


def test_slots_are_hip_memory_and_tensors_are_torchs_cuda():
    assert region_options(on_rocm(), "rocm") == {"device": "hip:0", "tcp_host": "127.0.0.1"}
    assert device_of_region("hip:1") is ROCM and device_of_region("cuda:0").name == "cuda"
    assert device_of_torch("cuda").has_streams and device_named("rocm").torch_type == "cuda"
    with pytest.raises(ConfigError, match="no device has slots on 'xpu:0'"):
        device_of_region("xpu:0")


def test_hip_numbers_the_gpus_and_other_names_of_it_are_kept_equal():
    assert visible_gpus(ROCM, (1, 0), {}) == {"HIP_VISIBLE_DEVICES": "1,0"}
    assert visible_gpus(ROCM, (1, 0), {"HIP_VISIBLE_DEVICES": "4,6"}) == {
        "HIP_VISIBLE_DEVICES": "6,4"
    }
    # vLLM ends if the older name differs (vllm/platforms/rocm.py).
    both = {"HIP_VISIBLE_DEVICES": "6,4", "CUDA_VISIBLE_DEVICES": "6,4"}
    assert visible_gpus(ROCM, (1, 0), {"CUDA_VISIBLE_DEVICES": "4,6"}) == both
    with pytest.raises(ConfigError, match="HIP_VISIBLE_DEVICES=0 but CUDA_VISIBLE_DEVICES=1"):
        visible_gpus(ROCM, (0,), {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"})


def test_hip_counts_what_rocr_leaves():
    assert visible_gpus(ROCM, (1, 0), {"ROCR_VISIBLE_DEVICES": "5,7"}) == {
        "HIP_VISIBLE_DEVICES": "1,0"
    }
    with pytest.raises(ConfigError, match="takes 2 GPUs but ROCR_VISIBLE_DEVICES=5"):
        visible_gpus(ROCM, (1, 0), {"ROCR_VISIBLE_DEVICES": "5"})


def test_every_process_sees_its_own_gpu_first():
    deployment = on_rocm(attention={"instances": 2}, ffn={"instances": 2})
    specs = [RoleSpec(role, i, deployment, "x") for role in ("attention", "ffn") for i in (0, 1)]
    visible = [spec.gpu_environment({})["HIP_VISIBLE_DEVICES"] for spec in specs]
    assert [gpus[0] for gpus in visible] == list("0123")


def test_the_drivers_list_of_gpus(tmp_path):
    assert architectures(tmp_path) == ()
    assert architectures(kfd(tmp_path, 0, 0, 90402, 90402)) == ("gfx942", "gfx942")
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / "properties").write_text("gfx_target_version 90500\n")
    assert architectures(tmp_path)[-1] == "gfx950"  # in numeric order
    (tmp_path / "11").mkdir()
    (tmp_path / "11" / "properties").write_text("gfx_target_version 90010\n")
    assert architectures(tmp_path)[-1] == "gfx90a"


@pytest.mark.parametrize("wire", ["fp8", "mxfp4"])
@pytest.mark.parametrize("arch", FP8_OF_ARCH)
def test_the_wire_follows_the_ffn_instances_gpus(tiny_models, arch, wire):
    deployment = on_rocm(tiny_models("qwen3_moe"), wire={"format": wire})
    with pytest.raises(ConfigError, match=r"set ffn\.arch to gfx942 or gfx950"):
        resolve(deployment)
    resolved = resolve(with_architecture(deployment, (arch, arch)))
    wanted = FP8_OF_ARCH[arch]
    suffix = " e4m3fnuz" if arch == "gfx942" else ""
    assert wire_fp8(resolved.deployment) == wanted
    assert resolved.contract.wire == f"{wire}{suffix}"


def test_exact_rows_need_no_fp8_type(tiny_models):
    assert resolve(on_rocm(tiny_models("qwen3_moe"))).contract.wire == "exact"


@pytest.mark.parametrize(("arch", "wrong"), [("gfx942", "e4m3fn"), ("gfx950", "e4m3fnuz")])
def test_a_wrong_fp8_type_is_refused_in_one_sentence(arch, wrong):
    said = rf"wire.fp8 {wrong} does not fit FFN instances on {arch}.*remove wire.fp8"
    with pytest.raises(ValueError, match=said):
        on_rocm(ffn={"arch": arch}, wire={"format": "fp8", "fp8": wrong})
    found_later = on_rocm(wire={"format": "fp8", "fp8": wrong})
    with pytest.raises(ConfigError, match=said):
        with_architecture(found_later, (arch,))
    with pytest.raises(ValueError, match="a type of AMD's gfx942 only"):
        Deployment.from_plain(
            {
                "model": "m",
                "attention": {"device": "cuda"},
                "ffn": {"device": "cuda"},
                "wire": {"format": "fp8", "fp8": "e4m3fnuz"},
            }
        )


def test_gpus_that_do_not_fit_the_file_are_refused():
    with pytest.raises(ConfigError, match=r"ffn\.arch is gfx950 but this host has gfx942"):
        with_architecture(on_rocm(ffn={"arch": "gfx950"}), ("gfx942",))
    with pytest.raises(ConfigError, match="this host has gfx1100 GPUs"):
        with_architecture(on_rocm(), ("gfx1100",))
    with pytest.raises(ConfigError, match="gfx942 and gfx950 GPUs, which multiply different"):
        with_architecture(on_rocm(), ("gfx942", "gfx950"))
    with pytest.raises(ValueError, match="arch gfx942 is an AMD GPU, but device is cpu"):
        Deployment.from_plain({"model": "m", "ffn": {"arch": "gfx942"}})


def test_a_mixed_pool_agrees_on_the_ffn_side(tiny_models, monkeypatch, tmp_path):
    """Attention on MI355X, FFN on MI300X: attention takes the type from the control plane."""
    deployment = on_rocm(tiny_models("qwen3_moe"), wire={"format": "fp8"})
    monkeypatch.setattr(gpus, "architectures", lambda: ("gfx942",))
    monkeypatch.setattr(gpus, "rocm_version", lambda: None)
    ffn = gpus.of_role(RoleSpec("ffn", 0, deployment, "tcp://127.0.0.1:1"))
    theirs = resolve(ffn.deployment).contract
    monkeypatch.setattr(gpus, "architectures", lambda: ("gfx950",))
    monkeypatch.setattr(gpus, "load_client", lambda path: None)
    answers = [None, theirs]  # nobody has registered at first
    monkeypatch.setattr(gpus, "contract", lambda address, keys: answers.pop(0))
    monkeypatch.setattr(gpus, "_ASK_S", 0.0)
    keys = tmp_path / "keys"
    attention = RoleSpec("attention", 0, deployment, "tcp://127.0.0.1:1", keys)
    assert needs_pool(deployment)
    ours = resolve(gpus.of_role(attention).deployment).contract
    assert ours == theirs and ours.wire == "fp8 e4m3fnuz"
    other = msgspec.structs.replace(theirs, wire="fp8")
    answers[:] = [other]
    assert resolve(gpus.of_role(attention).deployment).contract.wire == "fp8"


def test_stamps_in_graphs_are_refused():
    with pytest.raises(ValueError, match=r"cannot do on device rocm; set metrics\.stage_every: 0"):
        on_rocm(metrics={"stage_every": 5})
    assert on_rocm(metrics={"stage_every": 5}, pipeline={"graphs": False}).metrics.stage_every == 5


def test_graphs_are_refused_on_versions_that_replay_wrongly(tmp_path):
    (tmp_path / "version").write_text("7.2.1-43\n")
    version = rocm_version(tmp_path / "version")
    assert version == "7.2.1" and version in BAD_GRAPHS["gfx942"]
    assert rocm_version(tmp_path / "none") is None
    with pytest.raises(ConfigError, match=r"gfx942 with ROCm 7\.2\.1 .*set pipeline.graphs: false"):
        check_graphs(on_rocm(), ("gfx942",), version)
    with pytest.raises(ConfigError, match=r"set pipeline\.graphs: false"):
        check_graphs(on_rocm(ffn={"device": "cuda"}), ("gfx942",), version)
    check_graphs(on_rocm(ffn={"device": "cpu"}), ("gfx942",), version)  # steps are not captured
    check_graphs(on_rocm(), ("gfx950",), version)
    check_graphs(on_rocm(), ("gfx942",), "7.13.0")
    check_graphs(on_rocm(pipeline={"graphs": False}), ("gfx942",), version)


def test_vllms_aiter_switches_are_data_and_the_environment_wins():
    found = switches("deepseek", "gfx942", {"VLLM_ROCM_USE_AITER_MLA": "0"})
    assert found["VLLM_ROCM_USE_AITER"] == "1" and found["VLLM_ROCM_USE_AITER_MOE"] == "0"
    assert "VLLM_ROCM_USE_AITER_MLA" not in found
    assert "VLLM_ROCM_USE_AITER_FP4BMM" not in switches("deepseek", None, {})
    with pytest.raises(ConfigError, match="kernel aiter does not compute the attention of step3"):
        attention_backend("aiter", "step3")


def test_the_switches_and_backends_exist_in_vllm():
    """Rung 1: every name is one that the installed vLLM reads."""
    envs = pytest.importorskip("vllm.envs")
    registry = pytest.importorskip("vllm.v1.attention.backends.registry")
    for family in ("deepseek", "qwen3_moe", "step3"):
        for arch in FP8_OF_ARCH:
            assert set(switches(family, arch, {})) <= set(envs.environment_variables)
        for kernel in ("aiter", "triton"):
            if (kernel, family) != ("aiter", "step3"):
                name = attention_backend(kernel, family)
                assert name in registry.AttentionBackendEnum.__members__


def test_the_command_line_of_an_attention_instance(tiny_models):
    from attention_worker.vllm_hooks.command import attention_command

    model = tiny_models("qwen3_moe")
    spec = RoleSpec("attention", 0, on_rocm(model, attention={"kernel": "aiter"}), "tcp://h:1")
    argv, environment = attention_command(spec, {"VLLM_ROCM_USE_AITER_MHA": "0"})
    assert "--worker-cls=attention_worker.vllm_hooks.gpu.AfdGpuWorker" in argv
    assert "--attention-backend=ROCM_AITER_FA" in argv
    assert any("FULL_DECODE_ONLY" in argument for argument in argv)
    assert environment["HIP_VISIBLE_DEVICES"] == "0,1"
    assert environment["VLLM_ROCM_USE_AITER"] == "1"
    assert environment["VLLM_ROCM_USE_AITER_MHA"] == "0"
    for kernel, device in (("mqa", "rocm"), ("aiter", "cuda")):
        with pytest.raises(ValueError, match=f"kernel {kernel} runs on device"):
            Deployment.from_plain({"model": "m", "attention": {"device": device, "kernel": kernel}})
