"""Which of vLLM's two model runners an attention instance uses. Imports no vLLM.

vLLM's own rule decides (vllm/config/vllm.py: use_v2_model_runner), and its switch
``VLLM_USE_V2_MODEL_RUNNER``. What works on the first-generation runner only keeps that one.
"""

import logging
from collections.abc import Mapping

from afd.config.deployment import Deployment

logger = logging.getLogger("afd.attention")

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
FIRST, SECOND = "0", "1"


def why_first(deployment: Deployment) -> str | None:
    """Returns what needs the first-generation runner; None: nothing that is asked for does.

    Adapters were never run on the other one. Structured output works on both.
    """
    reasons = {
        "attention.speculation": deployment.attention.speculation is not None,
        "attention.tp": deployment.attention.tp > 1,
        "the section prefill": bool(deployment.prefill.instances),
        "--enable-lora": "--enable-lora" in deployment.attention.vllm_args,
    }
    return next((what for what, asked in reasons.items() if asked), None)


def model_runner(deployment: Deployment, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the setting of :data:`SWITCH`, if vLLM may not follow its own rule or the user's. One
    log line says why the user's is ignored."""
    reason = why_first(deployment)
    if reason is None:
        return {}
    if environment.get(SWITCH, FIRST) != FIRST:
        logger.warning(
            "%s is ignored: %s works on vLLM's first-generation model runner only", SWITCH, reason
        )
    return {SWITCH: FIRST}
