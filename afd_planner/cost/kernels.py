"""Measured kernel times of an accelerator, as factors on the rooflines.

``afd bench kernels`` writes afd_planner/data/kernels/ACCELERATOR.json. For every measured cell, the
factor is its time over the roofline of the same cell with the accelerator's fitted efficiencies,
interpolated between cells (:mod:`afd_planner.cost.grids`). So a cell that was measured costs what
was measured, and between and beyond the cells the roofline gives the shape.

Kernels that were not measured (other number formats, other attention) have no factor. A tensor
parallelism that was not measured has the factor of the nearest one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from afd_planner.cost.grids import NONE, Factors, Grid
from afd_planner.cost.roofline import attention_parts, ffn_part, head_part, routed_part
from afd_planner.cost.shape import EVEN_ROUTING, Efficiency, Routing, calibrated
from afd_planner.cost.stages import Part
from afd_planner.facts.attention import (
    Attention,
    GroupedQuery,
    Latent,
    projection_parameters_per_gpu,
)
from afd_planner.facts.ffn import Ffn, MoeFfn
from afd_planner.facts.files import DATA
from afd_planner.facts.hardware import Accelerator, load_accelerator
from afd_planner.facts.model import LayerGroup, ModelSpec
from afd_planner.facts.precision import Precision

FOLDER = DATA / "kernels"
FORMAT = "afd-kernel-times-1"
TPS = (1, 2, 4, 8)
"""Tensor parallelisms that are looked for in a table."""
MIXED = "mixed_attention"
"""Key of the attention cells whose requests have different lengths."""
_SCHEMES = {"bfloat16": "plain", "fp8": "fp8_block", "mxfp4": "mxfp4"}
"""Format of expert weights to the name that the table has for it."""

CoreKey = tuple[str, int, int, int, int]
"""kind, heads, key-value heads, columns of a key, columns of a value: on one GPU."""


def core_key(attention: Attention, tp: int) -> CoreKey | None:
    """Returns what decides the kernel of an attention layer, None if no kernel is measured."""
    if isinstance(attention, Latent):
        row = attention.rank + attention.rope_dim
        return "mla", attention.heads // tp, 1, row, attention.rank
    if isinstance(attention, GroupedQuery) and not attention.window:
        dim = attention.head_dim
        return "gqa", attention.heads // tp, max(1, attention.kv_heads // tp), dim, dim
    return None


@cache
def table_of(name: str) -> Mapping[str, Any] | None:
    """Returns the kernel times of an accelerator, None if there are none."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        return None
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table


def _basis(name: str) -> tuple[Accelerator, Efficiency]:
    """Returns the accelerator and the efficiencies to which the factors are relative."""
    accelerator = load_accelerator(name)
    return accelerator, replace(calibrated((accelerator,)), kernels=False)


def _factors(grids: Mapping[int, list[tuple[float, float, float]]]) -> Factors:
    return Factors(tuple((tp, Grid.of(points)) for tp, points in sorted(grids.items()) if points))


def _mixed(name: str, equal_lengths: bool) -> bool:
    """Whether the attention kernel of requests of different lengths is asked for and known."""
    return not equal_lengths and MIXED in (table_of(name) or {})


@cache
def core_factors(
    name: str, group: LayerGroup, precision: Precision, equal_lengths: bool
) -> Factors:
    """Returns the factors of an attention kernel over (rows, context).

    Without cells of mixed lengths, those of equal ones apply to both.
    """
    table = table_of(name)
    if table is None:
        return NONE
    cells = table.get(MIXED if _mixed(name, equal_lengths) else "attention", ())
    accelerator, efficiency = _basis(name)
    found: dict[int, list[tuple[float, float, float]]] = {}
    for tp in TPS:
        key = core_key(group.attention, tp)
        found[tp] = [
            (
                cell["rows"],
                cell["context"],
                1e-6 * cell["us"]
                / attention_parts(
                    group, accelerator, cell["rows"], cell["context"], precision, tp, efficiency
                )[1].seconds,
            )
            for cell in cells
            if key == tuple(cell[k] for k in ("kind", "heads", "kv_heads", "head_dim", "value_dim"))
            and cell["cache"] == precision.kv
        ]  # fmt: skip
    return _factors(found)


@cache
def projection_factors(name: str, group: LayerGroup, precision: Precision) -> Factors:
    """Returns the factors of the products around attention over rows."""
    table = table_of(name)
    if table is None or precision.attention_weights != "bfloat16":
        return NONE
    accelerator, efficiency = _basis(name)
    found: dict[int, list[tuple[float, float, float]]] = {}
    for tp in TPS:
        held = projection_parameters_per_gpu(group.attention, tp) + group.ffn.router_parameters
        found[tp] = [
            (
                cell["rows"],
                1.0,
                1e-6 * cell["us"]
                / attention_parts(group, accelerator, cell["rows"], 1, precision, tp, efficiency)[
                    0
                ].seconds,
            )
            for cell in table.get("dense", ())
            if (cell["tp"], cell["parameters"]) == (tp, int(held))
        ]  # fmt: skip
    return _factors(found)


_SAME = 0.01
"""Largest distance of the logarithms of two layers' sizes that are the same."""

ExpertLayer = tuple[int, int]
"""hidden size, width of an expert on one GPU."""


@cache
def _expert_grids(name: str, precision: Precision) -> Mapping[ExpertLayer, Grid]:
    """Returns a grid per measured layer over (rows per expert, experts held)."""
    table, scheme = table_of(name), _SCHEMES.get(precision.ffn_weights)
    if table is None:
        return {}
    accelerator, efficiency = _basis(name)
    fastest: dict[ExpertLayer, dict[tuple[float, float], float]] = {}
    for cell in table.get("experts", ()):
        if cell["scheme"] != scheme or not cell["pairs"]:
            continue
        layer = cell["hidden"], cell["width"]
        ffn = MoeFfn(*layer, cell["num_experts"], cell["top_k"])
        part = routed_part(ffn, accelerator, cell["pairs"], cell["used"], precision, 1, efficiency)
        factor = 1e-6 * cell["us"] / (part.seconds + efficiency.ffn_overhead_s)
        place = cell["rows"] * ffn.top_k / ffn.experts, float(cell["experts"])
        found = fastest.setdefault(layer, {})
        found[place] = min(found.get(place, math.inf), factor)
    return {
        layer: Grid.of((rows, held, factor) for (rows, held), factor in found.items())
        for layer, found in fastest.items()
    }


@cache
def expert_factors(name: str, ffn: Ffn, precision: Precision) -> Factors:
    """Returns the factors of routed experts over (rows per expert, experts held).

    They apply to roofline and fixed time together: a measured time contains its launches. A layer
    that was not measured has the factors of the measured layer with the nearest sizes, but never
    less than its roofline.
    """
    grids = _expert_grids(name, precision)
    if not grids or not isinstance(ffn, MoeFfn):
        return NONE

    def nearest(width: float) -> Grid:
        def distance(layer: ExpertLayer) -> float:
            return abs(math.log(layer[0] / ffn.hidden)) + abs(math.log(layer[1] / width))

        layer = min(grids, key=distance)
        return grids[layer] if distance(layer) < _SAME else grids[layer].at_least_one()

    return Factors(tuple((tp, nearest(ffn.intermediate / tp)) for tp in TPS))


def experts_measured(name: str, ffn: Ffn, precision: Precision) -> bool:
    """Returns whether the experts themselves were measured, whole or divided."""
    widths = {ffn.intermediate // tp for tp in TPS} if isinstance(ffn, MoeFfn) else set()
    return any((ffn.hidden, width) in _expert_grids(name, precision) for width in widths)


@cache
def head_factors(name: str, hidden: int, vocab: int, precision: Precision) -> Factors:
    """Returns the factors of LM head and sampling over rows. vocab: columns on one GPU."""
    table = table_of(name)
    if table is None or precision.head != "bfloat16":
        return NONE
    accelerator, efficiency = _basis(name)
    points = [
        (
            cell["rows"],
            1.0,
            1e-6 * cell["us"]
            / head_part(
                hidden, vocab, accelerator, cell["rows"], precision, efficiency
            ).seconds,
        )
        for cell in table.get("rest", ())
        if (cell["hidden"], cell["vocab"]) == (hidden, vocab)
    ]  # fmt: skip
    return _factors({1: points})


def measured_kernels(
    name: str, model: ModelSpec, precision: Precision, equal_lengths: bool = False
) -> tuple[str, ...]:
    """Returns the parts of a step of which an accelerator has measured kernels."""
    group = next((g for g in model.groups if isinstance(g.ffn, MoeFfn)), model.groups[-1])
    lengths = " (mixed lengths)" if _mixed(name, equal_lengths) else ""
    found = {
        f"attention kernel{lengths}": core_factors(name, group, precision, equal_lengths),
        "projections": projection_factors(name, group, precision),
        "experts": expert_factors(name, group.ffn, precision),
        "LM head": head_factors(name, model.hidden, model.vocab, precision),
    }
    if not experts_measured(name, group.ffn, precision):
        found["experts of the nearest measured size"] = found.pop("experts")
    return tuple(part for part, factors in found.items() if factors.grids)


def kernel_attention(
    group: LayerGroup,
    accelerator: Accelerator,
    rows: float,
    context: float,
    precision: Precision,
    tp: int,
    efficiency: Efficiency,
    queries: int = 1,
) -> tuple[Part, Part]:
    """Returns ``roofline.attention_parts``, with factors if ``efficiency.kernels``."""
    projections, core = attention_parts(
        group, accelerator, rows, context, precision, tp, efficiency, queries
    )
    if not efficiency.kernels:
        return projections, core
    name, tokens = accelerator.name, rows * queries
    around = projection_factors(name, group, precision).one(tp, tokens, 1.0)
    factors = core_factors(name, group, precision, efficiency.equal_lengths)
    inside = factors.one(tp, tokens, context)
    return _times(projections, around), _times(core, inside)


def attention_fixed_s(
    group: LayerGroup,
    accelerator: Accelerator,
    precision: Precision,
    efficiency: Efficiency,
    *,
    handed_over: bool,
) -> float:
    """Returns the fixed seconds of one attention layer.

    There are none where the products around attention were measured: a measured time contains its
    launches.

    Args:
        handed_over: the layer's experts are on other GPUs.
    """
    if efficiency.kernels and projection_factors(accelerator.name, group, precision).grids:
        return 0.0
    latent = efficiency.latent_overhead_s if isinstance(group.attention, Latent) else 0.0
    handover = efficiency.handover_s if handed_over else 0.0
    return efficiency.attention_overhead_s + latent + handover


def kernel_ffn(
    ffn: Ffn,
    accelerator: Accelerator,
    rows: float,
    precision: Precision,
    shards: int,
    tp: int,
    efficiency: Efficiency,
    routing: Routing = EVEN_ROUTING,
) -> tuple[Part, float]:
    """Returns ``roofline.ffn_part`` and the stage's fixed seconds, with a factor on both if
    ``efficiency.kernels``."""
    part = ffn_part(ffn, accelerator, rows, precision, shards, tp, efficiency, routing)
    overhead = efficiency.ffn_overhead_s
    if not efficiency.kernels or not isinstance(ffn, MoeFfn):
        return part, overhead
    factors = expert_factors(accelerator.name, ffn, precision)
    factor = factors.one(tp, rows * ffn.top_k / ffn.experts, ffn.experts / shards)
    return _times(part, factor), overhead * factor


def kernel_head(
    hidden: int,
    vocab: float,
    accelerator: Accelerator,
    rows: float,
    precision: Precision,
    efficiency: Efficiency,
) -> Part:
    """Returns ``roofline.head_part``, with a factor if ``efficiency.kernels``."""
    part = head_part(hidden, vocab, accelerator, rows, precision, efficiency)
    if not efficiency.kernels:
        return part
    factors = head_factors(accelerator.name, hidden, int(vocab), precision)
    return _times(part, factors.one(1, rows, 1.0))


def _times(part: Part, factor: float) -> Part:
    return Part(part.name, part.compute_s * factor, part.memory_s * factor)
