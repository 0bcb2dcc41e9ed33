"""What the system needs to know about a mixture-of-experts model, as plain data.

A family is one data file (`qwen3_moe.py`, `deepseek.py`, `step3.py`): where the router, the routed
experts and the shared experts sit in vLLM's module tree, and how a checkpoint names their tensors.
Nothing here reads weights or imports torch.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from afd.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
SCALE_SUFFIX = "_scale_inv"
"""What the name of an FP8 tensor and this name its block scales (DeepSeek-V3's checkpoints)."""


@dataclass(frozen=True)
class MoeModel:
    """Shape of one checkpoint, as far as disaggregation is concerned.

    `shared_intermediate` is the joint width of all shared experts (0 = none). `routed_scaling`
    multiplies the weighted sum of routed experts before the shared output is added (1.0 = not
    used). `moe_intermediate` is the width I of one routed expert: gate and up are [I, hidden].
    """

    family: str
    architecture: str
    num_layers: int
    moe_layers: tuple[int, ...]
    hidden: int
    moe_intermediate: int
    num_experts: int
    top_k: int
    shared_intermediate: int
    routed_scaling: float
    dtype: str


@dataclass(frozen=True)
class MlpNames:
    """Checkpoint tensor names of a gated MLP, as templates over {layer} and {expert}.

    `gate_up` is ("...gate...", "...up...") or one name of a tensor that holds gate rows, then up
    rows. Templates without {expert} name either a shared expert (2-D tensors) or all routed
    experts stacked along a leading expert dimension (3-D tensors); the family says which.
    """

    gate_up: tuple[str, ...]
    down: str

    @property
    def templates(self) -> tuple[str, ...]:
        return (*self.gate_up, self.down)

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.down

    def for_layer(self, layer: int, expert: int | None = None) -> "MlpNames":
        """The same names with {layer} (and {expert}, where used) filled in."""
        gate_up = tuple(t.format(layer=layer, expert=expert) for t in self.gate_up)
        return MlpNames(gate_up, self.down.format(layer=layer, expert=expert))

    def matches(self, name: str) -> bool:
        return any(_pattern(template).fullmatch(name) for template in self.templates)


@cache
def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for placeholder in ("{layer}", "{expert}"):
        escaped = escaped.replace(re.escape(placeholder), r"\d+")
    return re.compile(escaped)


@dataclass(frozen=True)
class Family:
    """Everything that differs between model families.

    Attributes:
        name: the family's name in messages and in MoeModel.family.
        vllm_class: architecture string of config.json -> "module:Class" inside vLLM.
        parse: config.json -> MoeModel; raises ConfigError for what the family cannot express.
        gate, experts: dotted paths of the router and of vLLM's FusedMoE, below a decoder layer.
        shared: dotted paths of shared-expert modules below a decoder layer.
        routed_names: the layouts a checkpoint may use for routed experts, most common first.
        shared_names: tensor names of the shared expert, None where there is none.
        refused_dtypes: dtype -> reason it cannot be served disaggregated.
        attention_args: further positional arguments of the attention module's forward, after
            positions and hidden states.
        cpu_env, cpu_args: extra environment and vLLM arguments needed by vLLM's CPU platform.
    """

    name: str
    vllm_class: Mapping[str, str]
    parse: Callable[[Mapping[str, object]], MoeModel]
    gate: str
    experts: str
    routed_names: tuple[MlpNames, ...]
    shared: tuple[str, ...] = ()
    shared_names: MlpNames | None = None
    refused_dtypes: Mapping[str, str] = field(default_factory=dict)
    attention_args: tuple[None, ...] = ()
    cpu_env: Mapping[str, str] = field(default_factory=dict)
    cpu_args: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.vllm_class)

    def is_expert_weight(self, name: str) -> bool:
        """True for a tensor that FFN instances read and attention instances must not."""
        shared = (self.shared_names,) if self.shared_names else ()
        name = name.removesuffix(SCALE_SUFFIX)
        return any(names.matches(name) for names in (*self.routed_names, *shared))

    def serve_as(self, model: MoeModel, dtype: str) -> MoeModel:
        """`model` with its serving dtype; "auto" keeps the checkpoint's.

        Raises:
            ConfigError: the dtype is unknown, or the family cannot be served in it.
        """
        chosen = model.dtype if dtype == "auto" else dtype
        if chosen not in DTYPES:
            known = ", ".join(("auto", *DTYPES))
            raise ConfigError(f"dtype {chosen!r} is not known; use one of {known}")
        if chosen in self.refused_dtypes:
            reason = self.refused_dtypes[chosen]
            raise ConfigError(f"{model.architecture} cannot be served in {chosen}: {reason}")
        return replace(model, dtype=chosen)
