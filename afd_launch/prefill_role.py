"""`afd prefill`: becomes the vLLM server of a colocated prefill instance."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NoReturn

from afd.config.roles import RoleSpec
from afd.errors import ConfigError
from afd.host.ports import held_ports


def run_prefill(spec: RoleSpec) -> NoReturn:
    """Replaces this process. Its requests can be computed elsewhere, so nothing is drained.

    Raises:
        ConfigError: see :func:`attention_worker.vllm_hooks.colocated.prefill_command`.
    """
    from attention_worker.vllm_hooks.colocated import prefill_command

    if not spec.api_port:
        raise ConfigError(
            "prefill.port is 0, which only afd serve can choose; set it, and run the gateway with"
            " the same file"
        )
    if not spec.transfer_port:
        with held_ports([spec.deployment.prefill.host]) as (free,):
            spec = replace(spec, transfer_port=free)
    argv, environment = prefill_command(spec)
    os.execve(argv[0], argv, environment)
