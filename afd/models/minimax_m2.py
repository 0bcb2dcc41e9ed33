"""MiniMax-M2: Mixtral's keys and names, another router. Source: vLLM 0.26 models/minimax_m2.py."""

from dataclasses import replace
from functools import partial

from afd.models import mixtral

FAMILY = replace(
    mixtral.FAMILY,
    name="minimax_m2",
    vllm_class={
        "MiniMaxM2ForCausalLM": "vllm.model_executor.models.minimax_m2:MiniMaxM2ForCausalLM"
    },
    parse=partial(mixtral.parse, family="minimax_m2"),
)
