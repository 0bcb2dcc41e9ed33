"""Writes a plan's xAyF unit as a file for ``afd simulate``.

The simulator's stage times are straight lines; these go through the planned point and half of its
rows, and half of its context. The FFN has another line beyond the planned rows. The turn of the
busiest pool is part of its stage. Dense layers, whose
FFN runs with attention, are part of ``rest``. Prompts, which a load of requests may bring, are
compute-bound: projections and attention at the rates of the cost model.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import yaml

from afd.errors import ConfigError
from afd_planner.cost.roofline import matmul_s
from afd_planner.cost.shape import AfdShape
from afd_planner.cost.stages import AfdStages
from afd_planner.facts.attention import projection_parameters_per_gpu
from afd_planner.facts.precision import wire_bytes
from afd_planner.report.text import headline, unit_text
from afd_planner.sizing.plan import OperatingPoint, Plan
from afd_planner.sizing.request import Request
from afd_planner.sizing.unit_cost import afd_point

STEPS = 50
_BEYOND = 4.0
"""Rows over the planned ones at which the FFN's slope for more rows is taken."""
VARIATION = 0.05
"""Coefficient of variation of every stage and link; assumed, replace it by your machines'."""


def simulation_yaml(plan: Plan) -> str:
    """Returns the text of the file. Raises ConfigError if there is no xAyF plan."""
    if plan.afd is None:
        raise ConfigError("there is no xAyF plan to simulate; raise --gpus or --tpot")
    data = simulation_data(plan.afd, plan.request)
    text: str = yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=96)
    return text


def simulation_data(point: OperatingPoint, request: Request) -> dict[str, Any]:
    """Returns the keys of a simulation of one unit, at the planned load in every step."""
    shape = point.shape
    assert isinstance(shape, AfdShape)
    whole, half = _stages(request, shape, 1.0, 1.0), _stages(request, shape, 0.5, 1.0)
    shorter = _stages(request, shape, 1.0, 0.5)
    x = shape.attention.instances
    rows, context = shape.tokens / x, shape.context
    by_token = (_attention(whole) - _attention(shorter)) / (rows * context / 2)
    by_row = (_attention(whole) - _attention(half)) / (rows / 2) - by_token * context
    fixed = _attention(whole) - rows * (by_row + by_token * context)
    ffn_row = (_ffn(whole) - _ffn(half)) / (shape.tokens / 2)
    more = _ffn(_stages(request, shape, _BEYOND, 1.0))  # with prompts, and compute-bound at last
    beyond = (more - _ffn(whole)) / ((_BEYOND - 1) * shape.tokens) - ffn_row
    remote = sum(len(group.layers) for group in whole.groups if group.ffn is not None)
    turn = max(group.turn_s for group in whole.groups)
    attention_decides = _attention(whole) > _ffn(whole)
    noise = {"kind": "lognormal", "variation": VARIATION}
    out, back = wire_bytes(shape.precision, request.model.hidden, _top_k(request))
    return {
        "name": f"{headline(replace(request, gpus=None))}: {unit_text(point)}",
        "sources": ["afd plan: modelled stage times; jitter is assumed"],
        "attention": {"instances": x, "gpus": shape.attention.gpus},
        "ffn": {"instances": shape.ffn.instances, "gpus": shape.ffn.gpus},
        "layers": remote,
        "depth": shape.depth,
        "times": {
            "attention": _linear(fixed + turn * attention_decides, by_row, by_token),
            "prefill": _prompts(shape, request, max(fixed, 0.0)),
            "ffn": {
                **_linear(
                    _ffn(whole) - shape.tokens * ffn_row + turn * (not attention_decides), ffn_row
                ),
                "beyond_rows": shape.tokens,
                "per_row_beyond_us": max(beyond, 0.0) * 1e6,
            },
            "rest": _linear(whole.rest_s + _beside(whole, shape.depth), 0.0),
        },
        "wire": {
            "gbit_per_s": _link_rate(shape, request) * 8 / 1e9,
            "latency_us": request.efficiency.wire_latency_s * 1e6,
            "out_bytes_per_row": out,
            "back_bytes_per_row": back,
        },
        "jitter": {stage: dict(noise) for stage in ("attention", "ffn", "wire", "rest")},
        "constant": {"rows": round(shape.batch / x), "context": context, "steps": STEPS},
    }


def _stages(request: Request, shape: AfdShape, rows: float, context: float) -> AfdStages:
    """Returns the stages with a share of the rows and of the context."""
    asked = replace(request, context=request.context.scaled(context))
    routing = shape.routing.redundant
    _, stages, _ = afd_point(
        asked,
        shape.attention,
        shape.ffn,
        shape.depth,
        shape.rows * rows,
        shape.precision.wire,
        routing,
    )
    return stages


def _prompts(shape: AfdShape, request: Request, fixed: float) -> dict[str, float]:
    """Returns attention of one layer over prompt rows, the mean over the layers of the model.

    The rows of an instance are divided over its data-parallel groups.
    """
    pool, efficiency, precision = shape.attention, request.efficiency, shape.precision
    layers = request.model.num_layers
    row = pair = 0.0  # seconds per row, and per row and token
    for group in request.model.groups:
        share = len(group.layers) / layers
        weights = projection_parameters_per_gpu(group.attention, pool.tp)
        row += share * matmul_s(
            2.0 * weights, pool.accelerator, precision.attention_weights, efficiency
        )
        rate = pool.accelerator.math_flops(precision.attention_math) * efficiency.attention
        pair += share * group.attention.prompt_flops(1.0) / pool.tp / rate
    groups = pool.gpus // pool.tp
    return _linear(fixed, row / groups, pair / groups)


def _attention(stages: AfdStages) -> float:
    """Returns the mean seconds of attention over the layers whose FFN is remote."""
    remote = [group for group in stages.groups if group.ffn is not None]
    total = sum(len(group.layers) * group.attention.seconds for group in remote)
    return total / sum(len(group.layers) for group in remote)


def _ffn(stages: AfdStages) -> float:
    remote = [(len(g.layers), g.ffn.seconds) for g in stages.groups if g.ffn is not None]
    return sum(count * seconds for count, seconds in remote) / sum(count for count, _ in remote)


def _beside(stages: AfdStages, depth: int) -> float:
    """Returns the seconds of a step in layers without a remote FFN."""
    local = [group for group in stages.groups if group.ffn is None]
    return depth * sum(len(group.layers) * group.attention.seconds for group in local)


def _top_k(request: Request) -> int:
    return max(group.ffn.top_k for group in request.model.groups)


def _link_rate(shape: AfdShape, request: Request) -> float:
    """Returns the slower of the two pools' bytes/s per direction and GPU."""
    gpus = shape.attention.accelerator, shape.ffn.accelerator
    if shape.one_server:
        return gpus[0].scale_up_bandwidth * request.efficiency.scale_up
    return min(gpu.nic_bandwidth for gpu in gpus) * request.efficiency.network


def _linear(fixed: float, per_row: float, per_token: float = 0.0) -> dict[str, float]:
    """Returns a stage time of the simulator; it takes no negative numbers."""
    data = {
        "fixed_us": max(fixed, 0.0) * 1e6,
        "per_row_us": max(per_row, 0.0) * 1e6,
        "per_row_ktoken_us": max(per_token, 0.0) * 1e9,
    }
    return {key: value for key, value in data.items() if value > 0}
