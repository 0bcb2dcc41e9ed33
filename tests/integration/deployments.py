"""The deployments under test, and the host that runs them one at a time, shared by tests."""

import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from adapters import adapter_arguments
from helpers import HEALTH_S, Running, environment, wait_until
from leftovers import shared_memory

from afd_bench.servers import disaggregated

Models = Callable[[str], Path]

SETTINGS: dict[str, object] = {
    "dtype": "float32",  # tokens must equal colocated vLLM's in float32 (docs/)
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_gib": 0.25,
}
BLOCK = "--block-size=32"  # small enough for short prompts to share blocks
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]


def _openai(model: Path) -> dict[str, object]:
    """1A1F; steps of at most 64 tokens, so that prompts are prefilled in chunks."""
    attention = {**SETTINGS, "max_num_batched_tokens": 64, "vllm_args": [BLOCK, *TOOLS]}
    return {
        "model": str(model),
        "attention": attention,
        "pipeline": {"depth": 3, "min_rows": 1},
        "deadlines": {"drain_s": 60},
    }


def _pair(model: Path) -> dict[str, object]:
    """2A2F with routed dispatch and room for a third attention instance; some experts are on both
    FFN instances. step_wait_ms is long, so that a step that wrongly waits for an idle instance is
    easy to see."""
    attention = {
        **SETTINGS,
        "instances": 2,
        "max_instances": 3,
        "max_num_batched_tokens": 128,
        "vllm_args": [BLOCK, *TOOLS],
    }
    return {
        "model": str(model),
        "attention": attention,
        "ffn": {"instances": 2, "redundant_experts": 1, "step_wait_ms": 300, "late_ms": 500},
        "wire": {"dispatch": "routed"},
        "pipeline": {"depth": 3, "min_rows": 1},
        "control": {"heartbeat_s": 0.2},
        "deadlines": {"drain_s": 60},
        "restart": {"max_restarts": 20},  # tests/integration/test_faults.py
    }


def _faults(model: Path, instances: int, tp: int = 1, ffn: int = 1) -> dict[str, Any]:
    """Deployments that are killed again and again.

    ffn: FFN instances. tp: ranks of an attention instance. With several, late_ms is long: then a
        rank that waits for another one in vain is late, but none that shares its core with four
        processes.
    """
    attention = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK, *TOOLS]}
    return {
        "model": str(model),
        "attention": {**attention, "instances": instances, "tp": tp},
        "ffn": {"instances": ffn, "late_ms": 5000 if tp > 1 else 1000},
        "pipeline": {"depth": 3, "min_rows": 1},
        "restart": {"max_restarts": 10},
        "deadlines": {"drain_s": 60},
    }


def _gateways(model: Path) -> dict[str, object]:
    """1A1F with two gateway processes."""
    return {**_faults(model, 1), "gateway": {"processes": 2}}


def _grow(model: Path, instances: int, dispatch: str, tp: int = 1) -> dict[str, object]:
    """xAxF with room for one more FFN instance. tp: ranks of an attention instance."""
    found = _faults(model, instances, tp=tp)
    return {
        **found,
        "ffn": {**found["ffn"], "instances": instances, "max_instances": instances + 1},
        "wire": {"dispatch": dispatch},
    }


def _step3(model: Path) -> dict[str, object]:
    attention = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK]}
    return {
        "model": str(model),
        "attention": attention,
        "pipeline": {"depth": 3, "min_rows": 1},
    }


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def _with_adapters(model: Path) -> dict[str, object]:
    """What n-gram speculation and LoRA adapters of attention need."""
    return {
        **SETTINGS,
        "max_num_batched_tokens": 128,
        "speculation": NGRAM,
        "vllm_args": [BLOCK, *adapter_arguments(model)],
    }


def _tp_adapters(model: Path) -> dict[str, object]:
    """1A1F; the attention instance has two ranks. With speculation and adapters."""
    return {
        "model": str(model),
        "attention": {**_with_adapters(model), "tp": 2},
        "ffn": {"late_ms": 5000},
        "pipeline": {"depth": 3, "min_rows": 1},
    }


def _ranks(model: Path) -> dict[str, object]:
    """2A1F; the FFN instance has two ranks. With speculation and adapters."""
    attention = {**_with_adapters(model), "instances": 2}
    return {
        "model": str(model),
        "attention": attention,
        "ffn": {"tp": 2},
        "pipeline": {"depth": 3, "min_rows": 1},
        "deadlines": {"ffn_s": 150},  # restarting both ranks takes this long on a busy machine
    }


def _rocm(
    model: Path, instances: int = 2, ffn: dict[str, object] | None = None, **sections: object
) -> dict[str, Any]:
    """Device rocm, for the stand-in node (tests/rocm_node): decode steps are replayed on both
    sides. instances: on each side. Without lookahead: vLLM for CPUs samples and prepares steps on
    the host, which no stream orders."""
    attention = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK]}
    return {
        "model": str(model),
        "attention": {**attention, "instances": instances, "device": "rocm"},
        "ffn": {"instances": instances, "device": "rocm", "backend": "reference", **(ffn or {})},
        "pipeline": {"depth": 3, "min_rows": 1, "lookahead": False},
        "restart": {"standby": False},  # on GPUs it would import beside the tests
        "deadlines": {"ffn_s": 150},
        **sections,
    }


def _rocm_ngram(model: Path) -> dict[str, object]:
    found = _rocm(model)
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    return {**found, "attention": {**found["attention"], "speculation": speculation}}


def _rocm_verbs(model: Path) -> dict[str, object]:
    """FAKE_IBVERBS names the libibverbs without hardware."""
    verbs = {"ports": ["fake0", "fake1"], "library": os.environ["FAKE_IBVERBS"]}
    return _rocm(model, transport={"backend": "verbs", "verbs": verbs})


DEPLOYMENTS: dict[str, tuple[str, Callable[[Path], dict[str, object]]]] = {
    "1A1F": ("qwen3_moe", partial(_faults, instances=1)),
    "2A1F": ("qwen3_moe", partial(_faults, instances=2)),
    "tp_1A1F": ("qwen3_moe", partial(_faults, instances=1, tp=2)),
    "tp_2A1F": ("qwen3_moe", partial(_faults, instances=2, tp=2)),
    "gateways": ("qwen3_moe", _gateways),
    "grow_1A1F": ("qwen3_moe", partial(_grow, instances=1, dispatch="broadcast")),
    "grow_2A2F": ("qwen3_moe", partial(_grow, instances=2, dispatch="routed")),
    "grow_ranks": ("qwen3_moe", partial(_grow, instances=1, dispatch="routed", tp=2)),
    "grow_shared": ("deepseek_v3", partial(_grow, instances=2, dispatch="broadcast")),
    "tp_4_ranks": ("qwen3_moe", partial(_faults, instances=1, tp=4)),
    "tp_2A2F": ("qwen3_moe", partial(_faults, instances=2, tp=2, ffn=2)),
    "tp_adapters": ("qwen3_moe", _tp_adapters),
    "openai": ("qwen3_moe", _openai),
    "pair": ("qwen3_moe", _pair),
    "ranks": ("qwen3_moe", _ranks),
    "rocm": ("qwen3_moe", _rocm),
    "rocm_1A1F": ("qwen3_moe", partial(_rocm, instances=1)),
    "rocm_grow": ("qwen3_moe", partial(_rocm, instances=1, ffn={"max_instances": 2})),
    "rocm_ngram": ("qwen3_moe", _rocm_ngram),
    "rocm_ranks": ("qwen3_moe", partial(_rocm, ffn={"instances": 1, "tp": 2})),
    "rocm_routed": (
        "qwen3_moe",
        partial(_rocm, ffn={"redundant_experts": 1}, wire={"dispatch": "routed"}),
    ),
    "rocm_verbs": ("qwen3_moe", _rocm_verbs),
    "step3": ("step3", _step3),
}


class Host:
    """Runs one deployment at a time. Consecutive tests that use the same one share it.

    A test may break the deployment: ``serve`` starts it again if it has ended, and waits for it
    if it is recovering.
    """

    def __init__(self, folder: Path, models: Models) -> None:
        self._folder = folder
        self._models = models
        self._stack = contextlib.ExitStack()
        self._name = ""
        self._starts = 0
        self.current: Running | None = None

    def serve(self, name: str) -> Running:
        current = self.current
        if current is None or self._name != name or not current.is_running():
            self.close()
            current = self._start(name)
        wait_until(current.is_whole, HEALTH_S, f"deployment {name} is whole")
        return current

    def close(self) -> None:
        self.current = None
        self._stack.close()

    def _start(self, name: str) -> Running:
        family, config = DEPLOYMENTS[name]
        self._starts += 1
        folder = self._folder / f"{name}{self._starts}"
        folder.mkdir()
        before = shared_memory()
        with environment(TMPDIR=str(folder), XDG_RUNTIME_DIR=""):
            server = self._stack.enter_context(disaggregated(config(self._models(family))))
        self._name, self.current = name, Running(server, folder, before)
        return self.current
