"""The map as a picture: a panel per model and kind of GPUs, contexts by budgets. Needs
matplotlib."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from afd_bench.planner.map import BUDGETS, CONTEXTS_K, MODELS, POOLS, MapCell

TPOT_MS = 50


def map_png(cells: Sequence[MapCell]) -> bytes:
    """Returns the PNG for a TPOT of 50 ms: AFD over the best colocated plan, by colour and number.

    Bold numbers win, or lose, also with the model's error.
    """
    by_place = {(c.model, c.pools, c.context_k, c.gpus): c for c in cells if c.tpot_ms == TPOT_MS}
    figure = Figure(figsize=(15, 13), layout="constrained")
    axes = figure.subplots(len(MODELS), len(POOLS), sharex=True, sharey=True)
    colours = matplotlib.colormaps["RdBu"]
    for row, model in enumerate(MODELS):
        for column, pools in enumerate(POOLS):
            panel = axes[row][column]
            grid = np.full((len(BUDGETS), len(CONTEXTS_K)), np.nan)
            for y, gpus in enumerate(BUDGETS):
                for x, thousands in enumerate(CONTEXTS_K):
                    cell = by_place.get((model, pools, thousands, gpus))
                    if cell is None or cell.decision == "neither":
                        continue
                    if 0 < cell.ratio < math.inf:
                        grid[y, x] = math.log2(cell.ratio)
                    text = "only AFD" if math.isinf(cell.ratio) else f"{cell.ratio:.2f}"
                    text = text if cell.ratio else "no AFD"
                    weight = "normal" if cell.decision == "undecided" else "bold"
                    panel.text(x, y, text, ha="center", va="center", fontsize=7, weight=weight)
            panel.imshow(grid, cmap=colours, vmin=-1, vmax=1, aspect="auto", origin="lower")
            panel.set_xticks(range(len(CONTEXTS_K)), [f"{k}K" for k in CONTEXTS_K], fontsize=7)
            panel.set_yticks(range(len(BUDGETS)), [str(n) for n in BUDGETS], fontsize=7)
            if row == 0:
                panel.set_title(pools, fontsize=9)
            if column == 0:
                panel.set_ylabel(f"{model}\nGPUs", fontsize=8)
    figure.suptitle(
        f"Modelled: AFD over the best colocated plan, TPOT {TPOT_MS} ms (h20+h200: tokens per USD,"
        " else tokens/s). Blue: AFD; red: colocated; bold: also with the model's error",
        fontsize=10,
    )
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=90, metadata={"Software": None})
    return out.getvalue()
