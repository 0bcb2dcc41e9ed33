"""The CPU worker of attention instances, without a device."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm.platforms import current_platform

if not current_platform.is_cpu():
    pytest.skip("vLLM is not the one for CPUs", allow_module_level=True)

from attention_worker.vllm_hooks import cpu


def test_a_worker_asks_for_amx_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of one row uses AMX in vLLM's attention kernel only, which does not ask for it."""
    asked: list[str] = []
    monkeypatch.setattr(cpu, "ask_for_amx", lambda: asked.append("amx"))
    monkeypatch.setattr(cpu.CPUWorker, "init_device", lambda self: asked.append("vLLM's part"))
    monkeypatch.setattr(cpu, "check_runner", lambda config: None)
    monkeypatch.setattr(cpu, "file_store", lambda rank, ranks: "")
    worker = object.__new__(cpu.AfdCpuWorker)
    worker.vllm_config = None
    worker.rank, worker.parallel_config = 0, SimpleNamespace(world_size=1)
    worker.use_v2_model_runner = False
    worker.model_runner = object.__new__(cpu.CPUModelRunner)
    worker.init_device()
    assert asked == ["amx", "vLLM's part"]
    assert isinstance(worker.model_runner, cpu.AfdCpuModelRunner)
