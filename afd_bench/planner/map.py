"""Where AFD wins, by the planner: models x GPUs x budgets x contexts x TPOT limits. Pure but for
the CSV file and the plot."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from afd_planner.cost.shape import AfdShape, calibrated
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model_hf import load_model
from afd_planner.sizing.context import fixed
from afd_planner.sizing.error import ErrorBand, error_of
from afd_planner.sizing.request import Request
from afd_planner.sizing.search import Limits, Search, afd_operating

MODELS = ("deepseek-v3", "kimi-k2", "qwen3-235b-a22b", "step-3", "glm-4.6")
POOLS = {
    "h200": ("h200", "h200"),
    "h20+h200": ("h20", "h200"),
    "h800": ("h800", "h800"),
    "mi300x": ("mi300x", "mi300x"),
    "mi355x": ("mi355x", "mi355x"),
}
"""Name to (attention, FFN). With two kinds the ratio is in tokens per USD, else in tokens/s."""

BUDGETS = (8, 16, 32, 64, 128, 256)
CONTEXTS_K = (1, 4, 16, 64, 128)
TPOTS_MS = (20, 50, 100)


@dataclass(frozen=True)
class MapCell:
    """One point.

    Attributes:
        afd, colocated: Tokens/s per GPU; 0 if no plan fits or meets the TPOT.
        ratio: xAyF over the best colocated plan; 0 without xAyF, inf without a colocated plan.
        lowest, highest: The ratio with the model's error.
        decision: disaggregate, colocated or undecided; "neither" if no plan exists.
        plan: For example 5A1F.
    """

    model: str
    pools: str
    context_k: int
    tpot_ms: int
    gpus: int
    afd: float
    colocated: float
    ratio: float
    lowest: float
    highest: float
    decision: str
    plan: str


def map_cells(
    models: Sequence[str] = MODELS,
    pools: Sequence[str] = tuple(POOLS),
    contexts_k: Sequence[int] = CONTEXTS_K,
) -> Iterator[MapCell]:
    """Yields every point; contexts that a model does not read are left out."""
    for name in models:
        model = load_model(name)
        known = [k for k in contexts_k if not model.max_context or k * 1024 <= model.max_context]
        for pool in pools:
            attention, ffn = (load_accelerator(gpu) for gpu in POOLS[pool])
            search: Search | None = None
            for thousands in known:
                context = fixed(thousands * 1024)
                if search is None:
                    efficiency = calibrated((attention, ffn))
                    search = Search(
                        Request(
                            model,
                            (attention,),
                            (ffn,),
                            context,
                            gpus=BUDGETS[0],
                            efficiency=efficiency,
                        )
                    )
                else:
                    search = search.at_context(context)
                error = error_of(search.request)
                for tpot in TPOTS_MS:
                    for gpus in BUDGETS:
                        yield _cell(search, error, pool, thousands, tpot, gpus)


def _cell(
    search: Search, error: ErrorBand, pool: str, thousands: int, tpot: int, gpus: int
) -> MapCell:
    limits = Limits(tpot / 1e3, gpus)
    afd, colocated = search.best_afd(limits), search.best_colocated(limits)
    ratio = afd.score / colocated.score if afd and colocated else (math.inf if afd else 0.0)
    lowest, highest = error.within(ratio)
    plan = ""
    if afd:
        shape = afd_operating(afd)[0].shape
        assert isinstance(shape, AfdShape)
        plan = f"{shape.attention.instances}A{shape.ffn.instances}F"
        plan += f"x{shape.attention.gpus}" if shape.attention.gpus > 1 else ""
    decision = error.decide(ratio).value if afd or colocated else "neither"
    return MapCell(
        search.request.model.name,
        pool,
        thousands,
        tpot,
        gpus,
        round(afd.per_gpu, 1) if afd else 0.0,
        round(colocated.per_gpu, 1) if colocated else 0.0,
        round(ratio, 4),
        round(lowest, 4),
        round(highest, 4),
        decision,
        plan,
    )


def write_csv(path: Path, cells: Sequence[MapCell]) -> None:
    """Writes one line per cell, with a header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(MapCell)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(cell) for cell in cells)


def read_csv(path: Path) -> list[MapCell]:
    """Returns the cells of a file that ``write_csv`` wrote."""
    kinds = {f.name: {"int": int, "float": float, "str": str}[str(f.type)] for f in fields(MapCell)}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            MapCell(**{name: kinds[name](text) for name, text in row.items()})
            for row in csv.DictReader(file)
        ]


def largest(cells: Sequence[MapCell], model: str, pools: str) -> MapCell | None:
    """Returns the cell with the largest finite ratio of a model on these GPUs."""
    found = [c for c in cells if (c.model, c.pools) == (model, pools) and 0 < c.ratio < math.inf]
    return max(found, key=lambda cell: cell.ratio, default=None)
