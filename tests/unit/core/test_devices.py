"""The device table, and the deployment file's choices that depend on it."""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
import torch

from afd import devices
from afd.config.choices import Choice, choices
from afd.config.deployment import Deployment, load_config
from afd.config.resolve import region_options, replays
from afd.devices import CUDA, DEVICES, Device, device_named, device_of_torch
from afd.errors import ConfigError
from afd.models import qwen3_moe
from afd.topology import visible_gpus
from afd.wire.streams_torch import HostStreams, make_streams, torch_device
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.selection import choose_backend
from ffn_worker.moe.vllm_cuda import VllmCudaBackend


@pytest.fixture
def new_device(monkeypatch) -> Device:
    """Adds another accelerator to the table. Its torch type is ``meta``, which needs no
    hardware."""
    made = dataclasses.replace(
        CUDA, name="npu", torch_device="meta", region_device="npu:0", visible_variables=("NPUS",),
        runtime="afd.wire.streams_torch:HostRuntime",
    )  # fmt: skip
    monkeypatch.setitem(DEVICES, made.name, made)
    monkeypatch.setitem(devices._OF_TORCH, made.torch_type, made)
    return made


def test_devices_are_found_by_name_and_by_torch_type():
    for name, device in DEVICES.items():
        assert device.name == name and device_named(name) is device
        assert torch_device(name) == torch.device(device.torch_device)
        assert torch_device(name).type == device.torch_type
    assert device_of_torch("cpu").host_memory
    assert not device_of_torch("cuda").host_memory and device_of_torch("cuda").captures_graphs
    with pytest.raises(ConfigError, match="device 'tpu' is unknown; use one of cpu, cuda, rocm"):
        device_named("tpu")
    with pytest.raises(ConfigError, match="no device has torch type 'xpu'"):
        device_of_torch("xpu")


def test_streams_are_made_by_the_device():
    assert isinstance(make_streams(torch.device("cpu"), 3), HostStreams)


def test_a_new_device_needs_only_its_table_entry(new_device, tmp_path):
    file = tmp_path / "d.yaml"
    file.write_text("model: m\nattention: {device: npu}\nffn: {device: npu}\n")
    deployment = load_config(file)
    assert replays(deployment, qwen3_moe.FAMILY)
    assert region_options(deployment, "npu") == {"device": "npu:0", "tcp_host": "127.0.0.1"}
    assert visible_gpus(new_device, (1, 0), {"NPUS": "4,6"}) == {"NPUS": "6,4"}
    assert isinstance(make_streams(torch_device("npu"), 3), HostStreams)
    with pytest.raises(ConfigError, match=r"shm cannot reach the memory of a npu device"):
        load_config(file, ["transport.backend=shm"])
    with pytest.raises(ConfigError, match=r"ipc connects devices of one kind, but .* is npu and"):
        load_config(file, ["transport.backend=ipc", "ffn.device=cpu"])
    mixed = load_config(file, ["ffn.device=cpu"])
    assert not replays(mixed, qwen3_moe.FAMILY)
    assert region_options(mixed, "cpu") == {"device": "cpu", "tcp_host": "127.0.0.1"}
    with pytest.raises(
        ConfigError, match=r"backend vllm_cuda runs on device cuda and rocm, not npu"
    ):
        load_config(file, ["ffn.backend=vllm_cuda"])


def test_a_host_device_lists_no_devices():
    assert visible_gpus(device_named("cpu"), (0,), {"CUDA_VISIBLE_DEVICES": "0"}) == {}


def test_choices_equal_what_the_ffn_worker_registers():
    backends = choices("moe_backend")
    assert {"torch", "reference", "vllm_cpu", "vllm_cuda", "triton"} <= backends.keys()
    assert backends["vllm_cuda"] == Choice("vllm_cuda", ("cuda", "rocm"))
    assert not backends["torch"].devices
    assert {"exact", "int4", "fp4"} <= choices("reduce_format").keys()
    for backend in backends.values():
        device = (*backend.devices, "cpu")[0]
        sides = {"device": device, "backend": backend.name}
        made = Deployment.from_plain({"model": "m", "attention": {"device": device}, "ffn": sides})
        assert made.ffn.backend == backend.name


def test_a_choice_that_is_not_installed_names_the_remedy():
    with pytest.raises(ConfigError, match=r"no_such_key of group afd.choices.*reinstall afd"):
        choices("no_such_key")


def test_devices_and_deployment_files_need_no_torch():
    code = "import sys, afd.devices, afd.config.deployment; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vllms_own_kernel_can_be_chosen_for_comparisons(monkeypatch):
    """``ffn.backend: vllm_cuda`` is selected by the FFN instance and can be captured in graphs."""
    sides = {"attention": {"device": "cuda"}, "ffn": {"device": "cuda", "backend": "vllm_cuda"}}
    deployment = Deployment.from_plain({"model": "m", **sides})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # Makes vLLM look installed.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    device = torch_device(deployment.ffn.device)
    for scheme in (Scheme.PLAIN, Scheme.FP8_BLOCK):
        backend = deployment.ffn.backend
        assert choose_backend(backend, torch.bfloat16, 256, 256, device, scheme) == "vllm_cuda"
    assert VllmCudaBackend.capturable and replays(deployment, qwen3_moe.FAMILY)
    with pytest.raises(ConfigError, match=r"vllm_cuda cannot run: .* not torch\.float32"):
        choose_backend("vllm_cuda", torch.float32, 256, 256, device)
