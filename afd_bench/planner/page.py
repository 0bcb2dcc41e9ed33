"""The result pages of `afd bench planner`. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from afd_bench.planner.cells import H200
from afd_bench.planner.compare import Error
from afd_bench.planner.map import (
    BUDGETS,
    CONTEXTS_K,
    MODELS,
    POOLS,
    TPOTS_MS,
    MapCell,
    largest,
)
from afd_bench.planner.simulated import Simulated, simulated_lines
from afd_planner.sizing.error import CALIBRATED_ERROR, COMPOSED_ERROR, MODEL_ERROR, Decision

CLOSE = 1.10

_ERRORS = """# The planner against what was measured

`afd bench planner --parts errors`. Every step of [gpu.md](gpu.md) that was timed, every colocated
vLLM beside them, and every ratio of the two, on 2 x H200 and 2 x H100; and the steps of 12 and 48
layers of [host.md](host.md). Nothing is fitted to the cells of H100: it has the efficiencies of
H200, the same chip with other memory. Two predictions:

- **composed**: attention, experts and wire as measured at the same batch, put together by the
  planner's formula for the pipeline. What the stage times do not separate (dense layers, logits,
  sampling) is modelled. This tests the formula.
- **modelled**: everything from data sheets, efficiencies and the kernels that were measured on one
  GPU ([which](../planner-model.md#measured-kernels)). This tests the whole planner. The
  efficiencies are those of [h200.yaml](../../afd_planner/data/hardware/h200.yaml);
  [planner-model.md](../planner-model.md#checked-on-h200) says which cells they come from. The right
  column has the defaults, which all other accelerators use.

A step of 1A1F was timed on the devices, which is its layers alone: vLLM computes logits and samples
after the replayed graph. The same step *served* is the server's time per token. Colocated steps are
served. A prediction has the tokens that a request had while it was measured, where they were
recorded (since 2026-11-29), else those of its prompt.

Predicted over measured:

| prediction | cells | within 10 % | lowest and highest | with default efficiencies |
|---|---|---|---|---|
"""

_CAUSES = f"""
What decides the errors:

- **Routing.** The planner takes rows to choose experts by chance. Random weights of some models
  send all rows to the same few, so that a step takes as little as a third of the time. These cells
  are [at the end](#routing-of-random-weights). Each was also measured with `--routing even`, in
  which chance chooses each row's experts on every server; that cell is in the other tables. How
  alike the rows are changes from run to run: the ratio of the coarse experts with 256 requests of
  16K was 0.81 on 2026-11-22 and 0.99 on 2026-11-29. With even routing it was 0.71 twice.
- **The host** of the one step of colocated vLLM that is off: two schedulers of 128 requests, with
  12 layers. The planner takes a step to last at least 2.2 ms and 17 us per request of a scheduler;
  here two schedulers in step need 4.7 ms [with one layer](host.md#one-layer). That is nothing
  beside the step of a whole model.
- **Stage timestamps** lengthen a step by 1 to 4 %, most at depth 1. The one step of 1A1F that is
  off has them.
- **Lengths.** If all requests of a cell are equally long, attention's time is a staircase around
  the number of multiprocessors: 21 rows of 4 key/value heads take as long as 24, and 1.55 times as
  long as 16. `afd plan` takes a table of [mixed lengths](../planner-model.md#mixed-lengths). Both
  were served, by 1A1F and by colocated vLLM, and each is predicted with its own table. H100 has no
  table of mixed lengths.

The planner decides only where the predicted ratio leaves the largest error that a ratio had,
whatever its routing, because nobody knows the routing of a plan's traffic in advance: a factor of
{CALIBRATED_ERROR.high:.2f} on H200 and H100, and {MODEL_ERROR.high:.2f} elsewhere. With measured
attention and experts, and so with their routing, it is {COMPOSED_ERROR.high:.2f}: both plans off by
9 %, in opposite directions.

Nothing between servers was measured: neither the NIC, nor expert parallelism over more than 2 GPUs.
"""

_MAP = f"""# Where AFD wins, by the planner

`afd bench planner --parts map`. All of it is **modelled**: no deployment of this size was measured.
H200 has its kernels of all five models as measured on one H200, and efficiencies and fixed times
from 2 H200 ([errors](planner.md)). Only H200 has the time between two micro-batches under AFD. H20,
H800, MI300X and MI355X use the default efficiencies, which no measurement on AMD supports.

- Experts and KV cache in FP8, attention weights in bfloat16, prefill elsewhere.
- Expert loads of the demo model, with one redundant expert per group where that helps.
- Ratio: tokens/s of the best xAyF plan over the best colocated plan on as many GPUs. For
  `h20+h200` (attention on H20, experts on H200, colocated on either): tokens per USD.
- Error: a factor of {CALIBRATED_ERROR.high:.2f} (h200) or {MODEL_ERROR.high:.2f} either way.

All {{count}} points, each with its band: [planner_map.csv](planner_map.csv).
For a buyer: [when to use AFD](../when-to-use-afd.md).

![AFD over the best colocated plan at 50 ms](planner_map.png)

"""

_UNITS = "Milliseconds; cells with stage times: per micro-batch and layer.\n"
_ALIKE = """Predicted for even routing, as a plan would be. Each cell was also measured with even
routing; see above.
"""

_SUMMARY: tuple[tuple[str, str, str, Callable[[Error], bool]], ...] = (
    ("steps, composed", "step_error", "composed", lambda e: True),
    (
        "steps of 1A1F, modelled",
        "step_error",
        "modelled",
        lambda e: not (e.colocated or e.alike or e.lengths) and e.gpu == H200,
    ),
    (
        "served steps of mixed and of equal lengths, modelled",
        "step_error",
        "modelled",
        lambda e: e.lengths,
    ),
    (
        "steps of 1A1F on 2 x H100, modelled",
        "step_error",
        "modelled",
        lambda e: not e.colocated and e.gpu == "h100",
    ),
    (
        "steps of colocated vLLM, modelled",
        "step_error",
        "modelled",
        lambda e: e.colocated and not e.alike,
    ),
    ("ratios, modelled", "ratio_error", "modelled", lambda e: not e.alike),
    (
        "steps of rows that random weights send to few experts, modelled",
        "step_error",
        "modelled",
        lambda e: e.alike,
    ),
    ("ratios of such steps", "ratio_error", "modelled", lambda e: e.alike),
)
"""Rows of the summary: label, metric, method, and which errors."""


def errors_page(fitted: Sequence[tuple[str, Error]], defaults: Sequence[tuple[str, Error]]) -> str:
    """Returns the page: summary, causes, and all errors, worst first."""
    lines = [_ERRORS.rstrip("\n")]
    for label, metric, method, wanted in _SUMMARY:
        ours, others = (
            [e for name, e in errors if (name, e.method) == (metric, method) and wanted(e)]
            for errors in (fitted, defaults)
        )
        lines.append(
            f"| {label} | {len(ours)} | {_close(ours)} | {_largest(ours)} |"
            f" {_close(others)}, {_largest(others)} |"
        )
    ratios = [error for name, error in fitted if name == "ratio_error"]
    right = sum((error.predicted > 1) == (error.measured > 1) for error in ratios)
    lines.append(
        f"\nThe winner is right in {right} of {len(ratios)} cells. Colocated vLLM won all of them,"
        " so this says little."
    )
    lines += [_CAUSES.rstrip("\n"), "\n## Ratios, worst first\n"]
    lines += _table([error for error in ratios if not error.alike], 1, 2)
    steps = [error for name, error in fitted if name == "step_error"]
    for method, title in (("composed", "Steps, composed"), ("modelled", "Steps, modelled")):
        lines += [f"\n## {title}, worst first\n", _UNITS]
        chosen = [e for e in steps if e.method == method]
        lines += _table([e for e in chosen if method == "composed" or not e.alike], 1e3, 3)
    lines += ["\n## Routing of random weights\n", _ALIKE]
    lines += _table([error for error in ratios if error.alike], 1, 2)
    lines += ["", _UNITS]
    lines += _table([e for e in steps if e.method == "modelled" and e.alike], 1e3, 3)
    return "\n".join(lines) + "\n"


def _table(errors: Sequence[Error], scale: float, digits: int) -> list[str]:
    """Returns a Markdown table of ``scale`` times the values, worst first."""
    rows = sorted(errors, key=lambda error: -error.size)
    return [
        "| cell | predicted | measured | predicted / measured |",
        "|---|---|---|---|",
        *(
            f"| {error.cell} | {error.predicted * scale:.{digits}f} |"
            f" {error.measured * scale:.{digits}f} | {error.ratio:.2f} |"
            for error in rows
        ),
    ]


def _close(errors: Sequence[Error]) -> str:
    return f"{sum(error.size <= CLOSE for error in errors)} of {len(errors)}"


def _largest(errors: Sequence[Error]) -> str:
    low, high = min(e.ratio for e in errors), max(e.ratio for e in errors)
    return f"{low:.2f} to {high:.2f}"


def map_page(cells: Sequence[MapCell], runs: Sequence[Simulated]) -> str:
    """Returns the page: decisions, largest gains, simulations, and a table per kind of GPUs."""
    lines = [_MAP.format(count=f"{len(cells):,}").rstrip("\n")]
    lines += ["\n## Decisions\n", "Points in which one of the two is certain, given the error.\n"]
    lines += ["| GPUs | AFD | colocated | undecided | of these, predicted above 1 |"]
    lines += ["|---|---|---|---|---|"]
    for pools in POOLS:
        own = [c for c in cells if c.pools == pools and c.decision != "neither"]
        count = {d: sum(c.decision == d.value for c in own) for d in Decision}
        above = sum(c.decision == Decision.UNDECIDED.value and c.ratio > 1 for c in own)
        lines.append(
            f"| {pools} | {count[Decision.DISAGGREGATE]} | {count[Decision.COLOCATED]} |"
            f" {count[Decision.UNDECIDED]} | {above} |"
        )
    lines += ["\n## The largest predicted gain\n"]
    lines += ["| model | GPUs | context, TPOT | plan | tokens/s/GPU, AFD and colocated | ratio |"]
    lines += ["|---|---|---|---|---|---|"]
    for model in MODELS:
        for pools in POOLS:
            cell = largest(cells, model, pools)
            if cell is not None:
                lines.append(
                    f"| {model} | {cell.gpus} {pools} | {cell.context_k}K, {cell.tpot_ms} ms |"
                    f" {cell.plan} | {cell.afd:,.0f}, {cell.colocated:,.0f} | {_ratio(cell)} |"
                )
    lines += simulated_lines(runs)
    by_place = {(c.model, c.pools, c.context_k, c.tpot_ms, c.gpus): c for c in cells}
    for pools in POOLS:
        lines += [f"\n## {pools}\n", "Ratio at 20 / 50 / 100 ms; - : no such plan.\n"]
        lines += ["| model | context | " + " | ".join(f"{n} GPUs" for n in BUDGETS) + " |"]
        lines += ["|---|---|" + "---|" * len(BUDGETS)]
        for model in MODELS:
            for thousands in CONTEXTS_K:
                found = [
                    [by_place.get((model, pools, thousands, tpot, gpus)) for tpot in TPOTS_MS]
                    for gpus in BUDGETS
                ]
                if all(cell is None for row in found for cell in row):
                    continue
                texts = (" / ".join(_short(cell) for cell in row) for row in found)
                lines.append(f"| {model} | {thousands}K | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def _short(cell: MapCell | None) -> str:
    if cell is None or cell.decision == "neither" or cell.ratio == 0:
        return "-"
    if math.isinf(cell.ratio):
        return "only AFD"
    text = f"{cell.ratio:.2f}"
    return text if cell.decision == Decision.UNDECIDED.value else f"**{text}**"


def _ratio(cell: MapCell) -> str:
    return f"{cell.ratio:.2f} ({cell.lowest:.2f} to {cell.highest:.2f})"
