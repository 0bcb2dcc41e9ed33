"""The plan as JSON-ready data."""

from __future__ import annotations

import math
from typing import Any

from afd_planner.cost.shape import AfdShape, Pool
from afd_planner.cost.stages import AfdStages
from afd_planner.report.text import headline
from afd_planner.report.verdict_text import change_text, reason_text, verdict_lines
from afd_planner.sizing.plan import OperatingPoint, Plan
from afd_planner.sizing.request import Request
from afd_planner.sizing.unit_cost import STAGES

SCHEMA = "afd-plan-2"


def plan_data(plan: Plan) -> dict[str, Any]:
    """Returns the whole plan. Keys name the units of times; infinite numbers become null."""
    verdict = plan.verdict
    measured = plan.afd.measured if plan.afd else ()
    return {
        "schema": SCHEMA,
        "request": request_data(plan.request),
        "verdict": {
            "decision": verdict.decision.value,
            "disaggregate": verdict.disaggregate,
            "ratio": _finite(verdict.ratio),
            "error": {
                "low": verdict.error.low,
                "high": verdict.error.high,
                "basis": verdict.error.basis,
            },
            "by_expert_load": {each.name: _finite(each.ratio) for each in verdict.routed},
            "not_served": list(verdict.not_served),
            "reasons": [
                {
                    "kind": reason.kind.name.lower(),
                    "value": _finite(reason.value),
                    "limit": _finite(reason.limit),
                    "unit": reason.unit,
                    "gain": _finite(reason.gain),
                    "text": reason_text(reason),
                }
                for reason in verdict.reasons
            ],
            "changes": [
                {
                    "kind": change.kind.name.lower(),
                    "value": change.value,
                    "ratio": _finite(change.ratio),
                    "text": change_text(change),
                }
                for change in verdict.changes
            ],
            "text": " ".join(verdict_lines(plan)),
        },
        "disaggregated": operating_data(plan.afd) if plan.afd else None,
        "stages": stages_data(plan.stages) if plan.stages else None,
        "colocated": operating_data(plan.colocated) if plan.colocated else None,
        "pareto": [
            {
                "tpot_ms": point.tpot_s * 1e3,
                "disaggregated_tokens_per_s_per_gpu": point.afd,
                "colocated_tokens_per_s_per_gpu": point.colocated,
                "disaggregated_tokens_per_usd": point.afd_per_usd,
                "colocated_tokens_per_usd": point.colocated_per_usd,
            }
            for point in plan.pareto
        ],
        "measured": list(measured),
        "modelled": [stage for stage in STAGES if stage not in measured],
    }


def request_data(request: Request) -> dict[str, Any]:
    precision = request.precision
    return {
        "text": headline(request),
        "model": request.model.name,
        "attention": [a.name for a in request.attention],
        "ffn": [a.name for a in request.ffn],
        "context": {
            "mean": request.context.mean,
            "lengths": list(request.context.lengths),
            "shares": list(request.context.shares),
        },
        "tpot_ms": request.tpot_s * 1e3,
        "gpus": request.gpus,
        "tokens_per_s": request.tokens_per_s,
        "accepted": request.accepted,
        "positions": request.positions,
        "objective": request.objective,
        "precision": {
            "attention_weights": precision.attention_weights,
            "ffn_weights": precision.ffn_weights,
            "kv": precision.kv,
            "attention_math": precision.attention_math,
        },
        "expert_load": {"source": request.spread.name, "spread": request.spread.spread},
        "efficiency": dict(vars(request.efficiency)),
    }


def operating_data(point: OperatingPoint) -> dict[str, Any]:
    shape = point.shape
    if isinstance(shape, AfdShape):
        unit: dict[str, Any] = {
            "attention": _pool(shape.attention, "dp"),
            "ffn": _pool(shape.ffn, "ep"),
            "depth": shape.depth,
            "rows_per_micro_batch": shape.rows,
            "wire": shape.precision.wire,
            "dispatch": "broadcast",
            "expert_imbalance": shape.routing.imbalance,
            "redundant_experts": shape.routing.redundant,
        }
    else:
        unit = {
            "accelerator": shape.accelerator.name,
            "gpus": shape.gpus,
            "dp": shape.dp,
            "tp": shape.tp,
            "ep": shape.ep,
            "redundant_experts": shape.routing.redundant,
            "micro_batches": 2 if shape.overlap else 1,
            "rows_per_step": shape.rows,
        }
    return {
        "unit": unit,
        "copies": point.copies,
        "others": [operating_data(other) for other in point.others],
        "gpus": point.gpus,
        "tpot_ms": point.tpot_s * 1e3,
        "step_ms": point.step_s * 1e3,
        "tokens_per_s": point.tokens_per_s,
        "tokens_per_s_per_gpu": point.per_gpu,
        "price_per_hour_usd": point.price_per_hour,
        "usd_per_million_tokens": point.usd_per_million,
        "binding": point.binding.name.lower(),
    }


def stages_data(stages: AfdStages) -> dict[str, Any]:
    return {
        "rest_ms": stages.rest_s * 1e3,
        "layers": [
            {
                "count": len(group.layers),
                "attention_us": group.attention.seconds * 1e6,
                "ffn_us": group.ffn.seconds * 1e6 if group.ffn else None,
                "to_ffn_us": group.to_ffn * 1e6,
                "to_attention_us": group.to_attention * 1e6,
            }
            for group in stages.groups
        ],
    }


def _pool(pool: Pool, groups: str) -> dict[str, Any]:
    return {
        "accelerator": pool.accelerator.name,
        "instances": pool.instances,
        "gpus_per_instance": pool.gpus,
        "tp": pool.tp,
        groups: pool.groups,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
