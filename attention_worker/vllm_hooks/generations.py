"""Which of vLLM's two model runners an attention instance uses. Imports no vLLM.

vLLM's own rule decides (vllm/config/vllm.py: use_v2_model_runner), and its switch
``VLLM_USE_V2_MODEL_RUNNER``. What works on the first-generation runner only keeps that one.
"""

import logging
from collections.abc import Mapping

from afd.config.deployment import Deployment
from afd.devices import device_named

logger = logging.getLogger("afd.attention")

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
FIRST, SECOND = "0", "1"


def why_first(deployment: Deployment) -> str | None:
    """Returns what works on the first-generation runner only; None: nothing that is asked for."""
    speculation = deployment.attention.speculation
    drafts = speculation is not None and speculation.has_draft_layers
    captured = device_named(deployment.attention.device).captures_graphs
    return _asked(
        {
            "the section prefill": bool(deployment.prefill.instances),
            "attention.speculation with draft layers and pipeline.graphs": (
                drafts and captured and deployment.pipeline.graphs
            ),
        }
    )


def why_not_by_itself(deployment: Deployment) -> str | None:
    """Returns what was seen on the second-generation runner, but on Triton's interpreter only
    (tests/integration/test_second_runner.py). So the user has to ask for that runner."""
    return _asked(
        {
            "attention.speculation": deployment.attention.speculation is not None,
            "attention.tp": deployment.attention.tp > 1,
        }
    )


def _asked(reasons: Mapping[str, bool]) -> str | None:
    return next((what for what, asked in reasons.items() if asked), None)


def model_runner(deployment: Deployment, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the setting of :data:`SWITCH`, if vLLM may not follow its own rule or the user's. One
    log line says why the user's is ignored, or what was not seen on a GPU."""
    asked = environment.get(SWITCH, FIRST) != FIRST
    if (reason := why_first(deployment)) is not None:
        if asked:
            logger.warning(
                "%s is ignored: %s works on vLLM's first-generation model runner only",
                SWITCH,
                reason,
            )
        return {SWITCH: FIRST}
    if (reason := why_not_by_itself(deployment)) is None:
        return {}
    if not asked:
        return {SWITCH: FIRST}
    logger.warning(
        "%s on vLLM's second-generation model runner was not seen on a GPU yet; without %s, the"
        " first-generation one serves it",
        reason,
        SWITCH,
    )
    return {}
