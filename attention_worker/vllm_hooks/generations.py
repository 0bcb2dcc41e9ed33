"""Which of vLLM's two model runners an attention instance uses. Imports no vLLM.

vLLM's own switch asks for the second-generation runner: ``VLLM_USE_V2_MODEL_RUNNER=1``. Without it
the first-generation runner is used, until the second one has run on GPUs as the first one has.
"""

import logging
from collections.abc import Mapping

from afd.config.deployment import Deployment

logger = logging.getLogger("afd.attention")

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
FIRST, SECOND = "0", "1"


def why_first(deployment: Deployment) -> str | None:
    """Returns what the hooks do on the first-generation runner only; None: nothing of it is asked.

    Adapters and structured output work on both.
    """
    reasons = {
        "attention.speculation": deployment.attention.speculation is not None,
        "attention.tp": deployment.attention.tp > 1,
        "the section prefill": bool(deployment.prefill.instances),
    }
    return next((what for what, asked in reasons.items() if asked), None)


def model_runner(deployment: Deployment, environment: Mapping[str, str]) -> str:
    """Returns the value of :data:`SWITCH`; one log line says why it is not the one asked for."""
    if environment.get(SWITCH, FIRST) in ("", FIRST):
        return FIRST
    if (reason := why_first(deployment)) is None:
        return SECOND
    logger.warning(
        "%s is ignored: %s works on vLLM's first-generation model runner only", SWITCH, reason
    )
    return FIRST
