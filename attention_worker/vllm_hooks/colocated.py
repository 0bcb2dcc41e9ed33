"""Command line and environment of a colocated prefill instance: vLLM with the whole model."""

import os
import sys
from collections.abc import Mapping

from afd.config.roles import RoleSpec
from attention_worker.vllm_hooks.command import attention_command
from attention_worker.vllm_hooks.versions import layout

_OF_ATTENTION = (
    "--compilation-config=",
    "--disable-cascade-attn",
    "--hf-overrides=",
    "--load-format=",
    "--middleware=",
    "--speculative-config=",
    "--worker-cls=",
)
"""Beginnings of the arguments that make a vLLM server an attention instance."""

PLUGIN = "afd_amx"
"""The plugin (pyproject.toml) that asks Linux for AMX in each process of vLLM, which vLLM does not
do before its attention kernel uses it. All other plugins stay out."""


def prefill_command(
    role: RoleSpec, environment: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """Returns argv and environment.

    All other arguments are those of attention instances, so that both make the same tokens of a
    prompt, and their KV caches have one layout. Raises ConfigError: as :func:`attention_command`.
    """
    prefill = role.deployment.prefill
    argv, environment = attention_command(role, environment)
    arguments = [argument for argument in argv[3:] if not argument.startswith(_OF_ATTENTION)]
    argv = [sys.executable, "-m", layout().server_module, *arguments]
    # vLLM takes the last of two equal arguments.
    argv += [
        f"--host={prefill.host}",
        f"--kv-cache-memory-bytes={int(prefill.kv_cache_gib * 2**30)}",
        *prefill.vllm_args,
    ]
    return argv, {**environment, "VLLM_PLUGINS": PLUGIN}
