"""The supported architectures, and the functions that read their config.json."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from afd.errors import ConfigError
from afd.models.fields import Config, architecture
from afd_planner.facts.attention import Attention
from afd_planner.facts.ffn import Ffn
from afd_planner.facts.model_hf import attention, ffn


@dataclass(frozen=True)
class ReaderFamily:
    """The readers of one model family. Each reader returns one entry per layer.

    ``tied``: whether embedding and LM head share weights if config.json does not say.
    """

    architectures: tuple[str, ...]
    attention: Callable[[Config, int], tuple[Attention, ...]]
    ffn: Callable[[Config, int], tuple[Ffn, ...]]
    tied: bool = False


FAMILIES = (
    ReaderFamily(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "Ministral3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen3ForCausalLM",
            "Ernie4_5ForCausalLM",
            "PanguEmbeddedForCausalLM",
            "GraniteForCausalLM",
            "Glm4ForCausalLM",
            "InternLM2ForCausalLM",
            "InternLM3ForCausalLM",
            "Olmo2ForCausalLM",
            "Olmo3ForCausalLM",
            "Exaone4ForCausalLM",
            "SeedOssForCausalLM",
            "SmolLM3ForCausalLM",
            "Phi3ForCausalLM",
            "MiMoForCausalLM",
            "HunYuanDenseV1ForCausalLM",
        ),
        attention.grouped,
        ffn.dense,
    ),
    ReaderFamily(
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "Cohere2ForCausalLM"),
        attention.layer_types,
        ffn.dense,
        tied=True,
    ),
    ReaderFamily(("Gemma2ForCausalLM",), attention.alternating, ffn.dense, tied=True),
    ReaderFamily(
        (
            "Qwen2MoeForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3VLMoeForConditionalGeneration",
            "MixtralForCausalLM",
            "MiniMaxM2ForCausalLM",
            "OlmoeForCausalLM",
            "FlexOlmoForCausalLM",
            "GraniteMoeForCausalLM",
            "GraniteMoeSharedForCausalLM",
            "PhiMoEForCausalLM",
            "Glm4MoeForCausalLM",
            "Dots1ForCausalLM",
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "PanguProMoEForCausalLM",
            "PanguProMoEV2ForCausalLM",
        ),
        attention.grouped,
        ffn.mixture,
    ),
    ReaderFamily(
        ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM"),
        attention.latent,
        ffn.mixture,
    ),
    ReaderFamily(
        (
            "Step3TextForCausalLM",
            "Step3VLForConditionalGeneration",
            "Step3vForConditionalGeneration",
        ),
        attention.mfa,
        ffn.step3,
    ),
    ReaderFamily(
        ("Llama4ForCausalLM", "Llama4ForConditionalGeneration"), attention.llama4, ffn.llama4
    ),
    ReaderFamily(
        ("MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"), attention.minimax, ffn.mixture
    ),
    ReaderFamily(("Qwen3NextForCausalLM",), attention.delta_net, ffn.mixture),
    ReaderFamily(("Ernie4_5_MoeForCausalLM",), attention.grouped, ffn.ernie, tied=True),
    ReaderFamily(("GptOssForCausalLM",), attention.layer_types, ffn.mixture),
)


def family_of(config: Config) -> tuple[ReaderFamily, Config]:
    """Returns the family and the config of the language model.

    Raises:
        ConfigError: The architecture is unknown. The message names similar known ones.
    """
    wanted = architecture(config)
    for family in FAMILIES:
        if wanted in family.architectures:
            nested = config.get("text_config")
            text = nested if isinstance(nested, dict) else config
            return family, {"architectures": [wanted], **text, **_outer(config, text)}
    names = [name for family in FAMILIES for name in family.architectures]
    nearest = difflib.get_close_matches(wanted, names, n=3, cutoff=0.0)
    raise ConfigError(
        f"the planner does not know the architecture {wanted}; the nearest of its {len(names)} "
        f"architectures are {', '.join(nearest)}; choose a model with a known architecture, or add "
        "this one to afd_planner/facts/model_hf/families.py"
    )


def _outer(config: Config, text: Config) -> dict[str, object]:
    # A nested config names its own class, which vLLM's registry may lack.
    keys = ("torch_dtype", "dtype", "quantization_config", "tie_word_embeddings", "architectures")
    return {k: config[k] for k in keys if k in config and (k not in text or k == "architectures")}
