"""The models that are compared with vLLM and Transformers."""

import random
from dataclasses import dataclass, replace

from afd_demo.sizes import Sizes
from attention_worker.vllm_hooks.versions import installed


@dataclass(frozen=True)
class Model:
    """A published layout and a format.

    colocated: why colocated vLLM 0.26 cannot answer on CPUs; "": it can. transformers: whether
    Transformers has the family. dtype, instances: see ``engines.Case``. text_twin: the layout of a
    text model with the same tensors, for vLLM alone. split: in split form, although its layers can
    be pipelined. depth: the deepest step.
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

    @property
    def name(self) -> str:
        what = "split" if self.split else self.stored_as
        return self.layout if what == "plain" else f"{self.layout}-{what}"


_SINKS = "vLLM's CPU attention takes sinks in bfloat16 models only"
FAMILIES = (
    Model("qwen3_moe"),
    Model("qwen2_moe"),
    Model("mixtral"),
    Model("deepseek_v2"),
    Model("deepseek_v3"),
    Model("kimi_k2", transformers=False),
    Model("glm4_moe"),
    Model("ernie45_moe", colocated="vLLM's CPU router leaves out the selection bias"),
    Model("minimax_m2", colocated="vLLM's CPU router has no sigmoid scores"),
    Model("gpt_oss", colocated=_SINKS),
    Model("llama4", colocated="vLLM needs the package torchvision for it"),
    Model("step3_vl", transformers=False, text_twin="step3_text"),
    # vLLM's CPU kernel for linear attention takes bfloat16 only. With one FFN instance, both sides
    # run the same kernels.
    Model("qwen3_next", transformers=False, dtype="bfloat16", instances=1, depth=1),
)
"""In sizes that are drawn anew for every run."""
FORMATS = (
    Model("deepseek_v3", "fp8_block"),
    Model("qwen3_moe", "fp8_block"),
    Model("glm4_moe", "fp8_channel"),
    Model("qwen3_moe", "fp8_tensor"),
    Model("qwen3_moe", "gptq"),
    Model("qwen3_moe", "awq"),
    Model("kimi_k2", "int4", transformers=False),
    Model("gpt_oss", "mxfp4", colocated=_SINKS),
)
"""Compared with their unquantised twins, in the sizes of the preset "tiny"."""
SPLIT = (
    Model("glm4_moe", split=True, depth=1),  # scaling of the routed sum, shared experts
    Model("llama4", colocated="needs torchvision", split=True, depth=1),  # weights on the input
)
"""The split form of models whose layers can be pipelined."""
ALL = (*FAMILIES, *FORMATS, *SPLIT)


def published_linear_heads() -> bool:
    """Whether vLLM's CPU kernel for linear attention takes heads of 128, as published, but not of
    32: from 0.28 on. Before, pages of the KV cache would be larger than the steps of this test."""
    vllm = installed()
    return vllm is not None and vllm.number >= (0, 28)


def drawn_sizes(model: Model, seed: int) -> Sizes:
    """Returns random sizes that the family can have."""
    draw = random.Random(f"{model.layout} {seed}")
    heads, head_dim = draw.choice((4, 8)), draw.choice((32, 64))
    experts = draw.choice((4, 6, 8, 12))
    layers = draw.randint(2, 4)
    sizes = Sizes(
        hidden=heads * head_dim,
        layers=layers,
        experts=experts,
        top_k=draw.randint(1, 3),
        intermediate=draw.choice((32, 64, 96, 160)),
        dense_intermediate=draw.choice((64, 192)),
        heads=heads,
        kv_heads=draw.choice([n for n in (1, 2, 4) if heads % n == 0]),
        head_dim=head_dim,
        vocab=512 + 32 * draw.randint(0, 3),
        shared_experts=draw.randint(1, 3),
        dense_first=draw.randint(0, layers - 1),
        mla=(32, 16 * draw.randint(1, 2), 32, 32 * draw.randint(1, 3), 64),
    )
    if model.layout == "qwen3_next" and published_linear_heads():
        sizes = replace(sizes, linear_head=128)
    if model.layout in ("llama4", "qwen3_next"):  # the last layer of two or four is the other kind
        sizes = replace(sizes, layers=4)
    if model.layout == "step3_vl":
        sizes = replace(sizes, layers=max(layers, 3))
    return sizes
