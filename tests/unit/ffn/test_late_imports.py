"""What a waiting process imports ahead of time."""

import importlib

import pytest
import torch

from ffn_worker.moe import late_imports, vllm_cuda


@pytest.mark.parametrize(
    "cuda, gpus, wanted",
    [("13.0", 1, [late_imports.VLLM_EXPERTS]), ("13.0", 0, []), (None, 0, []), (None, 1, [])],
    ids=["cuda", "no GPU", "cpu", "rocm"],
)
def test_hosts_with_nvidia_gpus_import_vllm_s_experts(monkeypatch, cuda, gpus, wanted):
    found = []
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(importlib, "import_module", found.append)
    late_imports.import_all()
    assert found == wanted


def test_the_name_is_the_one_that_the_backend_imports():
    source = vllm_cuda.__file__
    with open(source, encoding="utf-8") as file:
        assert f"from {late_imports.VLLM_EXPERTS} import" in file.read()
