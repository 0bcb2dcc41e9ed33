"""Entry point ``vllm.general_plugins``: vLLM calls :func:`register` in every process it starts."""

import logging
import os

from afd.config.roles import ROLE_FILE_ENV, load_role
from afd.host.logs import print_our_logs, say_phase


def register() -> None:
    """Registers the disaggregated model class, the weight loader and the remote experts.

    Does nothing unless ``AFD_ROLE_FILE`` names an attention role. So the installed plugin does not
    change other uses of vLLM.
    """
    if ROLE_FILE_ENV not in os.environ:
        return
    role = load_role()
    if role.role != "attention":
        return
    print_our_logs()
    say_phase(logging.getLogger("afd.attention"), "starting vLLM's engine")
    # Imported late: every vLLM process of the environment loads this module, and most return above.
    from attention_worker.vllm_hooks.register import register_model

    register_model(role)
