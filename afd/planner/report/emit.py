"""From a plan to the deployment file that ``afd serve`` runs.

The file holds what afd/config.py knows. There an attention instance is one process on one device,
so the file has one per data-parallel rank, and one FFN instance of ``ffn.tp`` ranks per
expert-parallel group; how the plan puts them on servers of several GPUs stands above it as a
comment.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import yaml

from afd.errors import ConfigError
from afd.planner.cost.shape import AfdShape
from afd.planner.cost.stages import step_seconds
from afd.planner.report.text import deployment, headline, split
from afd.planner.sizing.plan import Operating, Plan
from afd.planner.sizing.request import Request
from afd.planner.sizing.unit_cost import afd_point

CACHE_HEADROOM = 1.2
"""KV cache per planned one: requests end and begin unevenly."""

TOKENS_PER_BLOCK = 1024
"""Limits are rounded up to this many tokens."""

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "float16": "float16", "float32": "float32"}


def deployment_data(point: Operating, request: Request, model: str) -> dict[str, Any]:
    """Keys of a deployment file for one unit of ``point``; ``model`` as it should stand there.

    One attention instance per data-parallel rank, one FFN instance per expert-parallel group.

    Raises:
        ConfigError: ``point`` is not an xAyF plan.
    """
    shape = _afd(point)
    instances = shape.attention.groups
    rows = math.ceil(shape.batch / instances)
    length = _model_len(request)
    per_sequence = request.context.average(
        lambda tokens: request.model.kv_stored_bytes(tokens, request.precision.kv)
    )
    cache = rows * per_sequence * CACHE_HEADROOM / 2**30
    attention: dict[str, Any] = {
        "instances": instances,
        "device": "cuda",
        "max_model_len": length,
        "max_num_seqs": rows,
        "max_num_batched_tokens": max(_round_up(rows), 8 * TOKENS_PER_BLOCK),
        "kv_cache_gib": round(max(cache, 0.5), 1),
    }
    if request.precision.kv == "fp8":
        attention["vllm_args"] = ["--kv-cache-dtype", "fp8"]
    ffn: dict[str, Any] = {"instances": shape.ffn.groups, "device": "cuda"}
    if shape.ffn.tp > 1:
        ffn["tp"] = shape.ffn.tp
    return {
        "model": model,
        "attention": attention,
        "ffn": ffn,
        "pipeline": {"depth": shape.depth, "min_rows": split_from_rows(point, request)},
        "wire": {"format": shape.precision.wire},
    }


def split_from_rows(point: Operating, request: Request) -> int:
    """Rows per attention rank and micro-batch from which the planned depth beats depth 1.

    Below it every further micro-batch costs more in weight reads than it hides.
    """
    shape = _afd(point)
    most = max(1, int(shape.rows / shape.attention.groups))
    if shape.depth == 1:
        return 1
    rows = 1
    while rows < most:
        deep = _step(request, shape, shape.depth, rows)
        if deep <= _step(request, shape, 1, rows * shape.depth):
            break
        rows = math.ceil(rows * 1.25)
    return min(rows, most)


def _step(request: Request, shape: AfdShape, depth: int, rows: int) -> float:
    """Seconds of a step with ``rows`` per attention rank and micro-batch."""
    whole = float(rows * shape.attention.groups)
    _, stages, _ = afd_point(
        request, shape.attention, shape.ffn, depth, whole, shape.precision.wire
    )
    return step_seconds(stages, depth)


def _afd(point: Operating) -> AfdShape:
    if not isinstance(point.shape, AfdShape):
        raise ConfigError("a colocated plan has no deployment file; serve it with plain vLLM")
    return point.shape


def _model_len(request: Request) -> int:
    """Room for requests that grow past the mean they are planned for."""
    tokens = _round_up(2 * request.context.longest)
    return min(tokens, request.model.max_context or tokens)


def _round_up(tokens: float) -> int:
    return math.ceil(tokens / TOKENS_PER_BLOCK) * TOKENS_PER_BLOCK


def deployment_yaml(plan: Plan, model: str) -> str:
    """The file's text. Raises ConfigError where the plan has no xAyF deployment."""
    if plan.afd is None:
        raise ConfigError("there is no xAyF plan to emit: " + plan.verdict.reasons[0].kind.value)
    verdict = plan.verdict
    against = "no colocated plan fits"
    if plan.colocated is not None:
        against = f"{verdict.ratio:.2f} times the best colocated plan"
    advice = "recommended" if verdict.disaggregate else "NOT recommended"
    return file_text(plan.afd, plan.request, model, f"{advice}: {against}")


def file_text(point: Operating, request: Request, model: str, advice: str) -> str:
    """A deployment file with the plan as a comment above it."""
    shape = _afd(point)
    notes = [
        headline(replace(request, gpus=None)),
        f"plan: {deployment(point)}; {split(point)}; {shape.rows:.0f} rows per micro-batch",
        f"expected: TPOT {point.tpot_s * 1e3:.1f} ms, {point.per_gpu:,.0f} tokens/s/GPU,"
        f" bound by {point.binding.value}",
        advice,
    ]
    if request.precision.ffn_weights not in DTYPES:
        notes.append(
            f"priced with {request.precision.ffn_weights} weights; afd serve takes bfloat16 and"
            " float32 checkpoints, which carry fewer rows"
        )
    if max(shape.attention.gpus, shape.ffn.gpus) > 1:
        groups, tp = shape.ffn.groups, shape.ffn.tp
        ranks = f"{groups} x {tp}" if tp > 1 else f"{groups}"
        notes.append(
            f"below: one process per rank, {shape.attention.groups} + {ranks}; the"
            " plan's instances are servers whose GPUs pass rows on among themselves"
        )
    if shape.attention.tp > 1:
        notes.append(
            f"an attention rank has {shape.attention.tp} GPUs under TP, which afd serve does not"
            " start yet"
        )
    comment = "".join(f"# {note}\n" for note in notes)
    data = deployment_data(point, request, model)
    return comment + yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=96)
