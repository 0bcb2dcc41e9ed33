"""What a process does that imports what vLLM's API server and engine import, and is one later."""

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from afd.config.roles import ROLE_FILE_ENV, RoleSpec, load_role
from afd.devices import device_named
from afd.host.collector import collector_rests
from afd.models import read_model
from attention_worker.vllm_hooks import kept_fork
from attention_worker.vllm_hooks.command import CPU_WORKER, GPU_WORKER
from attention_worker.vllm_hooks.versions import layout


def import_all(role: RoleSpec) -> None:
    """Imports what serves a role like this one, its engine's worker too. It has no context of a GPU
    then."""
    vllm = layout()
    family, model = read_model(role.deployment.model)
    names = [
        vllm.server_module,
        vllm.arguments_module,
        "vllm.v1.engine.core",
        "attention_worker.vllm_hooks.register",
        family.vllm_class[model.architecture].partition(":")[0],
    ]
    names.append((GPU_WORKER if _on_gpu(role) else CPU_WORKER)[0])
    with collector_rests():
        for name in names:
            importlib.import_module(name)


def become_server(arguments: Sequence[str]) -> None:
    """Runs vLLM's API server as ``python -m`` does, in a process that has imported it."""
    module = layout().server_module
    role_file = Path(os.environ[ROLE_FILE_ENV])
    role = load_role(role_file)
    if _on_gpu(role):
        # Ranks choose their GPU by a variable, which a process reads at its first look at GPUs.
        one_worker = role.deployment.attention.tp == 1
        kept_fork.keep(role_file.parent, engine_keeps=one_worker)
    sys.argv[1:] = arguments
    del sys.modules[module]  # it is the main module now
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _on_gpu(role: RoleSpec) -> bool:
    return device_named(role.deployment.attention.device).torch_type != "cpu"
