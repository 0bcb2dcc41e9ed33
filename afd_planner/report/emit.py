"""Writes the deployment file that ``afd serve`` runs from a plan.

The file has the keys of afd/config/sections.py. An attention instance there is one process on one
GPU, so the file has one per data-parallel rank, and one FFN instance of ``ffn.tp`` ranks per
expert-parallel group. A comment says how the plan distributes them over servers, and in what the
plan differs from the file.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import yaml

from afd.errors import ConfigError
from afd.topology import SlotMap
from afd.wire.layout import layouts
from afd_planner.cost.served import (
    SERVED_ATTENTION,
    USABLE,
    Buffers,
    attention_weights,
    round_up,
    step_tokens,
)
from afd_planner.cost.shape import AfdShape
from afd_planner.cost.stages import step_seconds
from afd_planner.facts.precision import Precision, dtype_bytes
from afd_planner.report.text import headline, parallelism_text, unit_text
from afd_planner.sizing.error import Decision
from afd_planner.sizing.memory import sequence_bytes
from afd_planner.sizing.plan import OperatingPoint, Plan
from afd_planner.sizing.request import Request
from afd_planner.sizing.unit_cost import afd_point

CACHE_HEADROOM = 1.2
"""KV cache over the planned mean, because requests start and end unevenly."""

EXPERT_WEIGHTS = {"fp8": "fp8_block", "mxfp4": "mxfp4"}
"""Planned format of FFN weights to the value of ``ffn.weights`` that keeps experts in it."""

PLAIN = ("bfloat16", "float16", "float32")
"""Formats of weights that are not quantised."""


def deployment_data(point: OperatingPoint, request: Request, model: str) -> dict[str, Any]:
    """Returns the keys of a deployment file for one unit of ``point``.

    There is one attention instance per data-parallel rank and one FFN instance per expert-parallel
    group.

    Args:
        model: Value of the key ``model``.

    Raises:
        ConfigError: ``point`` is not an xAyF plan, or a stated layout that does not fit.
    """
    shape = _afd(point)
    instances = shape.attention.groups
    rows = math.ceil(shape.batch / instances)
    length = _model_len(request)
    tokens = step_tokens(rows * request.positions)
    needed, free = rows * sequence_bytes(request), free_for_cache(shape, request, tokens)
    if free < needed:
        raise ConfigError(
            "there is no file for this layout: beside weights and slots as afd serve holds them,"
            f" an attention GPU has {max(free, 0.0) / 2**30:.1f} GiB for a cache of"
            f" {needed / 2**30:.1f} GiB; lower --batch or the context"
        )
    cache = min(needed * CACHE_HEADROOM, free) / 2**30
    attention: dict[str, Any] = {
        "instances": instances,
        "device": shape.attention.accelerator.device,
        "max_model_len": length,
        "max_num_seqs": rows,
        "max_num_batched_tokens": tokens,
        # Rounded down: it may be all that is left.
        "kv_cache_gib": max(math.floor(cache * 10) / 10, 0.5),
    }
    if request.positions > 1:
        drafts = request.positions - 1
        attention["speculation"] = {"method": "ngram", "num_speculative_tokens": drafts}
    if request.precision.kv == "fp8":
        attention["vllm_args"] = ["--kv-cache-dtype", "fp8"]
    ffn: dict[str, Any] = {
        "instances": shape.ffn.groups,
        "device": shape.ffn.accelerator.device,
    }
    if shape.ffn.accelerator.architecture:
        ffn["arch"] = shape.ffn.accelerator.architecture  # decides the FP8 type of the wire
    if shape.ffn.tp > 1:
        ffn["tp"] = shape.ffn.tp
    if request.precision.ffn_weights in EXPERT_WEIGHTS:
        ffn["weights"] = EXPERT_WEIGHTS[request.precision.ffn_weights]
    if shape.routing.redundant:
        ffn["redundant_experts"] = shape.routing.redundant
    data: dict[str, Any] = {
        "model": model,
        "attention": attention,
        "ffn": ffn,
        "pipeline": {"depth": shape.depth, "min_rows": split_from_rows(point, request)},
        "wire": {"format": shape.precision.wire},
    }
    hosts = hosts_of(shape)
    if len(hosts) > 1:
        data["control"] = {"keys": "control.keys"}
    return {**data, "hosts": hosts}


def free_for_cache(shape: AfdShape, request: Request, tokens: int) -> float:
    """Returns the bytes that a GPU of an attention instance has for its KV cache under `afd serve`.

    Args:
        tokens: ``max_num_batched_tokens``, the rows of a slot.
    """
    model, precision = request.model, shape.precision
    pools = shape.attention, shape.ffn
    slots = SlotMap(pools[0].groups, pools[1].groups * pools[1].tp, shape.depth)
    top_k = max(group.ffn.top_k for group in model.groups)
    a2f, f2a = layouts(precision.wire, SERVED_ATTENTION, tokens, model.hidden, top_k)
    buffers = Buffers(slots, a2f.nbytes, f2a.nbytes, copied=not shape.one_server)
    weights = attention_weights(model, dtype_bytes(SERVED_ATTENTION))
    return USABLE * shape.attention.accelerator.memory_bytes - weights - buffers.attention


def hosts_of(shape: AfdShape) -> list[dict[str, Any]]:
    """Returns the key ``hosts``: one server per attention and per FFN instance of the plan.

    One server for both if they fit into it. The addresses are examples.
    """
    if shape.one_server:
        kind = {"count": shape.total_gpus, "kind": shape.attention.accelerator.name}
        return [{"name": "a1", "address": "127.0.0.1", "accelerators": kind}]
    hosts: list[dict[str, Any]] = []
    for letter, pool, role in (("a", shape.attention, "attention"), ("f", shape.ffn, "ffn")):
        kind = {"count": pool.accelerator.gpus_per_server, "kind": pool.accelerator.name}
        for number, chunk in enumerate(_chunks(pool.groups, pool.instances), start=1):
            instances: dict[str, list[int]] = {"attention": [], "ffn": [], role: chunk}
            place: dict[str, Any] = {
                "name": f"{letter}{number}",
                "address": f"10.0.0.{len(hosts) + 1}",
            }
            hosts.append({**place, "accelerators": dict(kind), **instances})
    return hosts


def _chunks(groups: int, servers: int) -> list[list[int]]:
    """Divides 0..groups-1 into consecutive lists, as equal as possible."""
    bounds = [groups * number // servers for number in range(servers + 1)]
    return [list(range(*pair)) for pair in pairwise(bounds)]


def split_from_rows(point: OperatingPoint, request: Request) -> int:
    """Returns the rows per attention rank and micro-batch from which the depth beats depth 1.

    With fewer rows, the weight reads of another micro-batch cost more than it hides.
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
    """Returns the seconds of a step with ``rows`` rows per attention rank and micro-batch."""
    whole = float(rows * shape.attention.groups)
    pools = shape.attention, shape.ffn
    redundant = shape.routing.redundant
    _, stages, _ = afd_point(request, *pools, depth, whole, shape.precision.wire, redundant)
    return step_seconds(stages, depth)


def _unit_rate(point: OperatingPoint, request: Request) -> float:
    """Returns the tokens per second and GPU of one unit, without the plan's other units."""
    shape = _afd(point)
    return shape.batch * request.accepted / point.step_s / shape.total_gpus


def _afd(point: OperatingPoint) -> AfdShape:
    if not isinstance(point.shape, AfdShape):
        raise ConfigError("a colocated plan has no deployment file; serve it with plain vLLM")
    return point.shape


def _model_len(request: Request) -> int:
    """Returns the context limit, twice the planned context so that requests can grow."""
    tokens = round_up(2 * request.context.longest)
    return min(tokens, request.model.max_context or tokens)


def _format_notes(precision: Precision) -> list[str]:
    """Returns how the planned weight formats differ from what the file serves."""
    notes = []
    attention = precision.attention_weights
    if attention not in PLAIN:
        notes.append(
            f"planned with {attention} attention weights: serve a checkpoint that has them; vLLM"
            " reads them, which has not run on GPUs"
        )
    return notes


def deployment_yaml(plan: Plan, model: str) -> str:
    """Returns the text of the file. Raises ConfigError if there is no xAyF plan."""
    if plan.afd is None:
        raise ConfigError("there is no xAyF plan to emit: " + plan.verdict.reasons[0].kind.value)
    verdict = plan.verdict
    if verdict.not_served:
        raise ConfigError(
            f"afd serve does not run {verdict.not_served[0]}: there is no file for it"
        )
    ratio = verdict.ratio if plan.colocated else None
    return file_text(plan.afd, plan.request, model, advice_text(verdict.decision, ratio))


def advice_text(decision: Decision, ratio: float | None) -> str:
    """Returns the comment that says whether to serve the file; ``ratio`` None: no colocated plan"""
    word = {
        Decision.DISAGGREGATE: "recommended",
        Decision.COLOCATED: "NOT recommended",
        Decision.UNDECIDED: "undecided, within the model's error",
    }[decision]
    if ratio is None:
        return f"{word}: no colocated plan fits"
    return f"{word}: {ratio:.2f} times the best colocated plan"


def file_text(point: OperatingPoint, request: Request, model: str, advice: str) -> str:
    """Returns a deployment file with the plan as a comment at its top."""
    shape = _afd(point)
    notes = [
        headline(replace(request, gpus=None)),
        f"plan: {unit_text(point)}; {parallelism_text(point)};"
        f" {shape.rows:.0f} rows per micro-batch",
        f"expected: TPOT {point.tpot_s * 1e3:.1f} ms, {_unit_rate(point, request):,.0f}"
        " tokens/s/GPU,"
        f" bound by {point.binding.value}",
        advice,
        *_format_notes(request.precision),
    ]
    if shape.attention.accelerator.device != shape.ffn.accelerator.device:
        notes.append("planned with GPUs of two makers; no such deployment has run yet")
    data = deployment_data(point, request, model)
    if max(shape.attention.gpus, shape.ffn.gpus) > 1:
        groups, tp = shape.ffn.groups, shape.ffn.tp
        ranks = f"{groups} x {tp}" if tp > 1 else f"{groups}"
        notes.append(
            f"processes: {shape.attention.groups} + {ranks} (attention + FFN); an instance of the"
            " plan is a server that runs several"
        )
    if len(data["hosts"]) > 1:
        notes.append(
            f"{len(data['hosts'])} hosts: set their addresses, then run"
            " `afd serve FILE --host NAME` on each (docs/hosts.md)"
        )
    comment = "".join(f"# {note}\n" for note in notes)
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=96)
    return comment + text
