"""Facts about mixture-of-experts models and families, as plain data. Reads no weights; no torch.

A family is one data file (`qwen3_moe.py`, `deepseek.py`, `step3.py`). It says where the router and
the routed and shared experts are in vLLM's module tree, and how a checkpoint names their tensors.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

from afd.errors import ConfigError
from afd.models.weight_format import weight_names

DTYPES = ("bfloat16", "float16", "float32")
ACTIVATIONS = ("silu", "swiglu_oai")
"""silu: silu(gate) * up. swiglu_oai (gpt-oss): gate is clamped to at most 7 and up to [-7, 7], then
gate * sigmoid(1.702 * gate) * (up + 1)."""


@dataclass(frozen=True)
class MoeModel:
    """The parts of a checkpoint's shape that disaggregation needs.

    moe_layers: whose experts are remote. Those from num_layers on are draft layers.
    moe_intermediate: width I of one routed expert; gate and up are [I, hidden].
    shared_intermediate: total width of all shared experts; 0: none.
    routed_scaling: factor on the weighted sum of routed experts, applied before the shared output
        is added; 1.0: none.
    activation: of the routed experts, an element of ACTIVATIONS.
    expert_bias: gate, up and down of the routed experts have biases.
    weight_on_input: the router weight multiplies a routed expert's input, not its output (Llama 4);
        top_k is 1.
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
    activation: str = "silu"
    expert_bias: bool = False
    weight_on_input: bool = False

    @property
    def step_layers(self) -> tuple[int, ...]:
        """The remote layers of a step: without the draft layers, each of which is a step."""
        return tuple(layer for layer in self.moe_layers if layer < self.num_layers)

    @property
    def draft_layers(self) -> tuple[int, ...]:
        return self.moe_layers[len(self.step_layers) :]

    @property
    def any_math(self) -> bool:
        """Whether experts are more than silu(gate) * up: only some backends compute them."""
        return self.expert_bias or self.activation != "silu"


@dataclass(frozen=True)
class MlpNames:
    """Checkpoint tensor names of a gated MLP, as templates over {layer} and {expert}.

    gate_up: ("...gate...", "...up..."), or one tensor with gate rows followed by up rows.

    Templates without {expert} name a shared expert (2-D tensors) or all routed experts, stacked
    along a leading expert dimension (3-D tensors); the family says which.

    interleaved: the one gate_up tensor has gate and up rows in turns (gpt-oss).
    transposed: unquantised stacked tensors are [experts, in, out].

    Names are those of an unquantised checkpoint; ``weight_format.tensor_name`` gives the others.
    """

    gate_up: tuple[str, ...]
    down: str
    interleaved: bool = False
    transposed: bool = False

    @property
    def templates(self) -> tuple[str, ...]:
        return (*self.gate_up, self.down)

    @property
    def per_expert(self) -> bool:
        return "{expert}" in self.down

    def for_layer(self, layer: int, expert: int | None = None) -> "MlpNames":
        """Returns the names with {layer} and, if used, {expert} filled in."""
        gate_up = tuple(t.format(layer=layer, expert=expert) for t in self.gate_up)
        down = self.down.format(layer=layer, expert=expert)
        return replace(self, gate_up=gate_up, down=down)

    def below(self, prefix: str) -> "MlpNames":
        """Returns the names with `prefix` instead of "model."."""
        *gate_up, down = (prefix + name.removeprefix("model.") for name in self.templates)
        return replace(self, gate_up=tuple(gate_up), down=down)

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
    """Everything in which model families differ.

    Attributes:
        name: the family's name in messages and in MoeModel.family.
        vllm_class: architecture string of config.json -> "module:Class" inside vLLM.
        parse: config.json -> MoeModel; raises ConfigError if the model is not supported.
        gate, experts: dotted paths of the router and of vLLM's FusedMoE, below a decoder layer.
        float32_gate: the router takes its input in float32.
        attention, dense: dotted paths of attention and of a dense FFN, below a decoder layer.
        shared: dotted paths of shared-expert modules below a decoder layer.
        text_prefix: architecture with an image encoder -> what precedes the names of the text
            model's tensors. Only the text model is loaded; `vllm_class` names its class.
        routed_names: layouts that a checkpoint may use for routed experts, most common first.
        shared_names: tensor names of the shared expert; None: there is none.
        shared_gate: name of the weight [1, hidden] of a sigmoid gate on the shared expert's output,
            a template over {layer}; "": there is no gate.
        refused_dtypes: dtype -> reason why it cannot be served, and the remedy.
        attention_none: further arguments of the attention module's forward; all are None.
        cpu_env, cpu_args: environment and vLLM arguments that vLLM's CPU platform needs.
        mtp: architecture that vLLM gives a model of draft layers, and its "module:Class"; both "":
            draft layers are not served.
        draft_prefix: what draft layers' names have instead of "model."; those layers count from 0.
            "": they are named like decoder layers behind the last one.
        fused: form of attention that `attention.fused` computes: "heads" (norms of single heads),
            "low_rank" (norm of low-rank queries); "": none.
        eagle3: whether vLLM's class gives the layer inputs that an EAGLE-3 head reads.
        split: why the layers cannot be pipelined; "": they can. See `split_form`.
        sparse: config key of the number of tokens that sparse attention keeps, which vLLM computes
            on GPUs only; "": attention is over all tokens.
    """

    name: str
    vllm_class: Mapping[str, str]
    parse: Callable[[Mapping[str, object]], MoeModel]
    routed_names: tuple[MlpNames, ...]
    gate: str = "mlp.gate"
    experts: str = "mlp.experts"
    float32_gate: bool = False
    attention: str = "self_attn"
    dense: str = "mlp"
    shared: tuple[str, ...] = ()
    shared_names: MlpNames | None = None
    shared_gate: str = ""
    refused_dtypes: Mapping[str, str] = field(default_factory=dict)
    attention_none: tuple[str, ...] = ()
    text_prefix: Mapping[str, str] = field(default_factory=dict)
    cpu_env: Mapping[str, str] = field(default_factory=dict)
    cpu_args: tuple[str, ...] = ()
    mtp: tuple[str, str] = ("", "")
    draft_prefix: str = ""
    fused: str = ""
    eagle3: bool = False
    split: str = ""
    sparse: str = ""

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.vllm_class)

    def is_expert_weight(self, name: str) -> bool:
        """Whether FFN instances read this tensor. Attention instances must not read it."""
        shared = (self.shared_names,) if self.shared_names else ()
        layouts = (*self.routed_names, *shared)
        if self.draft_prefix and name.startswith(self.draft_prefix):
            name = "model." + name.removeprefix(self.draft_prefix)
        if self.shared_gate and _pattern(self.shared_gate).fullmatch(name):
            return True
        return any(names.matches(weight) for weight in weight_names(name) for names in layouts)

    def attention_name(self, architecture: str, name: str) -> str | None:
        """Returns the name under which attention instances load a tensor; None: they do not."""
        if self.is_expert_weight(name):
            return None
        prefix = self.text_prefix.get(architecture)
        if prefix is None:
            return name
        inner = name.removeprefix(prefix)
        in_text = name.startswith(prefix) and inner.startswith(("model.", "lm_head."))
        return inner if in_text else None

    def serve_as(self, model: MoeModel, dtype: str) -> MoeModel:
        """Returns `model` with its serving dtype; "auto" keeps the checkpoint's dtype.

        Raises:
            ConfigError: the dtype is unknown, or the family cannot be served in it.
        """
        chosen = model.dtype if dtype == "auto" else dtype
        if chosen not in DTYPES:
            known = ", ".join(("auto", *DTYPES))
            raise ConfigError(f"dtype {chosen!r} is unknown; use one of {known}")
        if chosen in self.refused_dtypes:
            reason = self.refused_dtypes[chosen]
            raise ConfigError(f"{model.architecture} cannot be served in {chosen}: {reason}")
        return replace(model, dtype=chosen)


def split_form(family: Family, name: str, architectures: tuple[str, ...], why: str) -> Family:
    """Returns `family` for models of these architectures whose layers cannot be pipelined.

    Only the routed experts are remote. vLLM's own MoE layer does the rest: it scales their sum,
    adds the shared experts, and multiplies router weights to the input.
    """

    def parse(config: Mapping[str, object]) -> MoeModel:
        return replace(
            family.parse(config),
            family=name,
            shared_intermediate=0,
            routed_scaling=1.0,
            weight_on_input=False,
        )

    last = list(family.vllm_class.values())[-1]
    return replace(
        family,
        name=name,
        vllm_class={a: family.vllm_class.get(a, last) for a in architectures},
        parse=parse,
        shared=(),
        shared_names=None,
        shared_gate="",
        mtp=("", ""),
        eagle3=False,
        split=why,
    )
