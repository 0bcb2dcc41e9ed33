"""Registers our classes in vLLM's own registries.

Only resume.py and engine_process.py replace parts of vLLM.
"""

import importlib

from vllm import ModelRegistry
from vllm.model_executor.model_loader import register_model_loader
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from afd.config.roles import RoleSpec
from afd.errors import ConfigError
from afd.models import read_config, read_model
from attention_worker.shared_names import start_tracker
from attention_worker.vllm_hooks import engine_process, kept_fork
from attention_worker.vllm_hooks.draft import drafting
from attention_worker.vllm_hooks.loader import LOAD_FORMAT, AttentionWeightLoader
from attention_worker.vllm_hooks.model import disaggregated, text_only
from attention_worker.vllm_hooks.resume import install
from attention_worker.vllm_hooks.routing import register_remote_experts
from attention_worker.vllm_hooks.split import split


def register_model(role: RoleSpec) -> None:
    """Registers the model class with remote experts for the architecture of the role's checkpoint.

    It passes a class object, not a "module:class" string: vLLM inspects a string in a subprocess,
    which costs seconds at every start (vllm/model_executor/models/registry.py).
    """
    family, model = read_model(role.deployment.model)
    module, _, name = family.vllm_class[model.architecture].partition(":")
    base = getattr(importlib.import_module(module), name)
    if model.architecture in family.text_prefix:
        base = text_only(base)
    install(_vocabulary(role))
    if role.deployment.attention.tp > 1 or not current_platform.is_cpu():
        start_tracker()  # vLLM has queues in shared memory between its engine and its workers
    if current_platform.is_cpu() or kept_fork.context() is not None:
        engine_process.install()
    register_remote_experts()
    register_model_loader(LOAD_FORMAT)(AttentionWeightLoader)
    if role.deployment.attention.kernel == "mqa":
        register_backend(
            AttentionBackendEnum.CUSTOM, "attention_worker.vllm_hooks.mqa_backend.MqaBackend"
        )
    if family.split:
        # Where vLLM has no sparse attention, resolve() limits requests to what it would keep.
        remote = split(base, sparse=family.sparse if current_platform.is_cpu() else "")
    else:
        remote = disaggregated(base, family)
    ModelRegistry.register_model(model.architecture, remote)
    speculation = role.deployment.attention.speculation
    if speculation is not None and speculation.method == "mtp":
        architecture, source = family.mtp
        module, _, name = source.partition(":")
        draft = getattr(importlib.import_module(module), name)
        ours = split(draft, drafts=True) if family.split else drafting(draft, family)
        ModelRegistry.register_model(architecture, ours)


def _vocabulary(role: RoleSpec) -> int:
    """Returns the number of token ids of the role's checkpoint."""
    config = read_config(role.deployment.model)
    text = config.get("text_config")
    size = (text if isinstance(text, dict) else config).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(f"config.json of {role.deployment.model} names no vocab_size")
    return size
