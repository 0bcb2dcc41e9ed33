"""Which sizes a run of these tests draws, and how a failure names them."""

import os
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

from afd_bench.families.cases import ALL, DRAFTS, Model
from afd_demo.sizes import PRESETS, Sizes
from attention_worker.vllm_hooks.versions import installed

SEED = int(os.environ.get("AFD_TEST_SEED") or time.time())
"""Sizes of families are drawn from it. Every run prints it; AFD_TEST_SEED repeats a run."""
DAMAGED = "damaged"
"""A case whose checkpoint has one attention weight of another shape than config.json says."""

FLOAT32_GATE = "float32-gate"
"""A case whose routers are float32 in a bfloat16 model."""


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
    if model.method == "eagle3":  # reads the inputs of three layers behind the first
        sizes = replace(sizes, layers=4)
    if model.layout == "step3_vl":
        sizes = replace(sizes, layers=max(layers, 3))
    return sizes


def sizes_of(model: Model) -> Sizes:
    return PRESETS["tiny"] if model.stored_as != "plain" else drawn_sizes(model, SEED)


def beside_vllm(model: Model) -> bool:
    """Whether a model is compared with colocated vLLM: what only Transformers can answer is not.

    Nor are formats of families that Transformers has. An engine of vLLM takes seconds to start, and
    both read the same unquantised checkpoint; `afd bench families` compares them with vLLM.
    """
    return not model.colocated and not (model.stored_as != "plain" and model.transformers)


def described(model: Model) -> str:
    return f"{model.name}, AFD_TEST_SEED={SEED}, {sizes_of(model)}"


def models_of(parameters: Iterable[Mapping[str, object]]) -> list[Model]:
    """Returns the models among the parameters of selected tests, which may be of other folders."""
    found = [values.get("model") for values in parameters]
    named = {model.name for model in found if isinstance(model, Model)}
    return [model for model in (*ALL, *DRAFTS) if model.name in named]
