"""What a process does that imports what vLLM's API server and engine import, and is one later."""

import importlib
import runpy
import sys
from collections.abc import Sequence

from afd.config.roles import RoleSpec
from afd.models import read_model
from attention_worker.vllm_hooks.command import CPU_WORKER
from attention_worker.vllm_hooks.versions import layout


def import_all(role: RoleSpec) -> None:
    """Imports what serves a role like this one. It makes no thread and does not touch a GPU.

    On CPUs the engine is a fork of the API server (engine_process.py), so its worker is among it.
    """
    vllm = layout()
    family, model = read_model(role.deployment.model)
    names = [
        vllm.server_module,
        vllm.arguments_module,
        "vllm.v1.engine.core",
        "attention_worker.vllm_hooks.register",
        family.vllm_class[model.architecture].partition(":")[0],
    ]
    if role.deployment.attention.device == "cpu":
        names.append(CPU_WORKER[0])
    for name in names:
        importlib.import_module(name)


def become_server(arguments: Sequence[str]) -> None:
    """Runs vLLM's API server as ``python -m`` does, in a process that has imported it."""
    module = layout().server_module
    sys.argv[1:] = arguments
    del sys.modules[module]  # it is the main module now
    runpy.run_module(module, run_name="__main__", alter_sys=True)
