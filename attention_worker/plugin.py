"""Entry point ``vllm.general_plugins``: vLLM calls :func:`register` in each of its processes."""

import os

from afd.launch.logs import print_our_logs
from afd.roles import ROLE_FILE_ENV, load_role


def register() -> None:
    """Register the disaggregated model class, the weight loader and the remote experts.

    Does nothing unless the process was started as an attention instance (``AFD_ROLE_FILE`` names an
    attention role), so an installed plugin leaves other uses of vLLM as they are.
    """
    if ROLE_FILE_ENV not in os.environ:
        return
    role = load_role()
    if role.role != "attention":
        return
    print_our_logs()
    # Imported here, because every vLLM process of the environment loads this module.
    from attention_worker.register import register_model

    register_model(role)
