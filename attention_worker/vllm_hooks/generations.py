"""Which of vLLM's two model runners an attention instance uses. Imports no vLLM.

vLLM's own rule decides (vllm/config/vllm.py: use_v2_model_runner), and its switch
``VLLM_USE_V2_MODEL_RUNNER``. What works on the first-generation runner only keeps that one.
"""

import logging
from collections.abc import Mapping

from afd.config.deployment import Deployment
from afd.devices import device_named
from attention_worker.vllm_hooks.versions import layout

logger = logging.getLogger("afd.attention")

SWITCH = "VLLM_USE_V2_MODEL_RUNNER"
FIRST, SECOND = "0", "1"


def why_first(deployment: Deployment) -> str | None:
    """Returns what works on the first-generation runner only; None: nothing that is asked for."""
    speculation = deployment.attention.speculation
    drafts = speculation is not None and speculation.has_draft_layers
    captured = device_named(deployment.attention.device).captures_graphs
    reasons = {
        "the section prefill": bool(deployment.prefill.instances),
        "attention.speculation with draft layers and pipeline.graphs": (
            drafts and captured and deployment.pipeline.graphs
        ),
        "attention.speculation by n-gram, before vLLM 0.32,": (
            speculation is not None and not drafts and not layout().second_runner_ngram
        ),
    }
    return next((what for what, asked in reasons.items() if asked), None)


def model_runner(deployment: Deployment, environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the setting of :data:`SWITCH`, if vLLM may not follow its own rule or the user's. One
    log line says why the user's is ignored, or what was not seen on a GPU.

    Speculation was seen on the second-generation runner on Triton's interpreter only
    (tests/integration/test_second_runner.py). So the user has to ask for that runner.
    """
    asked = environment.get(SWITCH, FIRST) != FIRST
    if (reason := why_first(deployment)) is not None:
        if asked:
            logger.warning(
                "%s is ignored: %s works on vLLM's first-generation model runner only",
                SWITCH,
                reason,
            )
        return {SWITCH: FIRST}
    if deployment.attention.speculation is None:
        return {}
    if not asked:
        return {SWITCH: FIRST}
    logger.warning(
        "attention.speculation on vLLM's second-generation model runner was not seen on a GPU yet;"
        " without %s, the first-generation one serves it",
        SWITCH,
    )
    return {}
