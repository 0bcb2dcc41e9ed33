"""The models that are compared with vLLM and Transformers."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Model:
    """A published layout and a format.

    colocated: why colocated vLLM 0.26 cannot answer on CPUs; "": it can. transformers: whether
    Transformers has the family. dtype, instances: see
    :class:`afd_bench.families.engines.Case`. text_twin: the layout of a
    text model with the same tensors, for vLLM alone. split: in split form, although its layers can
    be pipelined. depth: the deepest step. drafts: tokens per step that are drafted. method: how,
    mtp (by the checkpoint's draft layers), eagle or eagle3. prefix_caching: whether vLLM has it on
    CPUs.
    """

    layout: str
    stored_as: str = "plain"
    colocated: str = ""
    transformers: bool = True
    dtype: str = "float32"
    instances: int = 2
    text_twin: str = ""
    split: bool = False
    depth: int = 3
    drafts: int = 0
    method: Literal["mtp", "eagle", "eagle3"] = "mtp"
    prefix_caching: bool = True

    @property
    def name(self) -> str:
        what = "split" if self.split else self.method if self.drafts else self.stored_as
        return self.layout if what == "plain" else f"{self.layout}-{what}"


SINKS = "vLLM's CPU attention takes sinks in bfloat16 models only"
FAMILIES = (
    Model("qwen3_moe"),
    Model("qwen2_moe"),
    Model("mixtral"),
    Model("deepseek_v2"),
    Model("deepseek_v3"),
    Model("deepseek_v32", colocated="vLLM has sparse attention on GPUs only", depth=1),
    Model("kimi_k2", transformers=False),
    Model("glm4_moe"),
    Model("ernie45_moe", colocated="vLLM's CPU router leaves out the selection bias"),
    Model("minimax_m2", colocated="vLLM's CPU router has no sigmoid scores"),
    Model("gpt_oss", colocated=SINKS),
    Model("llama4", colocated="vLLM needs the package torchvision for it"),
    Model("step3_vl", transformers=False, text_twin="step3_text"),
    # vLLM's CPU kernel for linear attention takes bfloat16 only. With one FFN instance, both sides
    # run the same kernels.
    Model("qwen3_next", transformers=False, dtype="bfloat16", instances=1, depth=1),
)
"""Tests draw their sizes anew for every run."""
FORMATS = (
    Model("deepseek_v3", "fp8_block"),
    Model("qwen3_moe", "fp8_block"),
    Model("glm4_moe", "fp8_channel"),
    Model("qwen3_moe", "fp8_tensor"),
    Model("qwen3_moe", "gptq"),
    Model("qwen3_moe", "gptq_ordered"),
    Model("qwen3_moe", "awq"),
    Model("qwen3_moe", "int4_all"),
    Model("kimi_k2", "int4", transformers=False),
    Model("gpt_oss", "mxfp4", colocated=SINKS),
    Model("deepseek_v3", "mxfp4_quark"),
)
"""Compared with their unquantised twins, in the sizes of the preset "tiny"."""
SPLIT = (
    Model("glm4_moe", split=True, depth=1),  # scaling of the routed sum, shared experts
    Model("llama4", colocated="needs torchvision", split=True, depth=1),  # weights on the input
)
"""The split form of models whose layers can be pipelined."""
EAGLE = (
    Model("qwen3_moe", drafts=3, method="eagle"),
    Model("qwen3_moe", drafts=3, method="eagle3"),
    Model("deepseek_v3", drafts=3, method="eagle3"),
)
NEXT_MTP = Model(
    "qwen3_next",
    transformers=False,
    dtype="bfloat16",
    instances=1,
    depth=1,
    drafts=2,
    prefix_caching=False,  # vLLM's is a Triton kernel, for linear attention with speculation
)
DRAFTS = (Model("deepseek_v3_mtp", drafts=3), Model("glm4_moe", drafts=2), NEXT_MTP, *EAGLE)
"""With speculation by draft layers or a draft model; not among ALL."""
ALL = (*FAMILIES, *FORMATS, *SPLIT)
