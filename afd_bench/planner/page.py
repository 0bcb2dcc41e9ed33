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
vLLM beside them, and every ratio of the two, on 2 x H200 and 2 x H100; and the steps of
[host.md](host.md). Nothing is fitted to the cells of H100: it has the efficiencies of H200, the
same chip with other memory. Two predictions:

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
served.

Predicted over measured:

| prediction | cells | within 10 % | lowest and highest | with default efficiencies |
|---|---|---|---|---|
"""

_CAUSES = f"""
The planner decides only where the predicted ratio leaves the largest error that a ratio had with
the planner's routing: a factor of {CALIBRATED_ERROR.high:.2f} on H200 and H100,
{MODEL_ERROR.high:.2f} elsewhere (of a cell that was measured again since), and
{COMPOSED_ERROR.high:.2f} with measured attention and experts (a plan off by 15 %, one by 11).

Why the others are off:

- **Routing** (*counted*). These cells ran random weights on random caches, and their rows choose
  far fewer experts than chance would: 8 to 11 of 32 in a step of the coarse experts, 54 of 256 of
  deepseek-v3. `afd bench gpu routing` held the same loads on one H200 and counted
  ([data](experts/random_weights.json)); the predictions here have those counts. **If chance chose
  instead, as `afd plan` assumes, these steps would be predicted up to 3.0 times too long, and the
  ratios 0.74 to 0.81 times as high.** That is where the stated error of {CALIBRATED_ERROR.high:.2f}
  comes from: nobody knows the routing of a plan's traffic in advance.
  Nine of these cells were also measured with `--routing even`, in which chance chooses each row's
  experts, on both servers. The experts of deepseek-v3 then take 2.5 to 4.5 ms instead of 0.9 to
  1.2, and coarse experts lose by 0.62, 0.60 and 0.71 instead of 0.80, 0.77 and 0.81.
- **A slow host** (12 layers, 256 requests at 1K). The devices have little to do, so the host
  decides. The planner takes a step to last at least 2.2 ms and 17 us per request of a scheduler,
  for both servers. Runs on 2 x H200, ms served (on the devices):

  | run | 1A1F depth 1 | 1A1F depth 2 | colocated, TP2 | colocated, DP2 with EP |
  |---|---|---|---|---|
  | [host.md](host.md), two machines; the first is here | 7.9 (7.2), 9.1 (7.4) | 8.2 (7.6) | | |
  | `decode`, where two servers start in 82 s | 8.2 (6.9) | 8.8 (7.5) | 5.9 | |
  | `decode`, where three start in 189 s; here | 8.6 (7.1) | 10.4 (7.6) | 7.7 | 6.4 |
  | predicted | 7.6 (6.4) | 8.6 (7.4) | 6.6 | 5.0 |

  `afd bench gpu host` measures a host; `--efficiency host_s=... --efficiency host_row_s=...` tells
  `afd plan`.
- **Answers grow** while they are measured, and attention reads them too. With 1,224 tokens instead
  of the prompt's 1,024, the 6.4 ms of the devices in this table would be 6.7. The benches record
  the tokens since 2026-11-29. No cell has such a record yet; those of `host` have them by their
  steps.
- **A stream per micro-batch at depth 2** (*retired*). Both micro-batches end together, and the FFN
  GPU waits for attention on both. The formula does not describe that, and such streams begin at
  depth 3 today.
- **Lengths.** If all requests of a cell are equally long, attention's time is a staircase around
  the number of multiprocessors: 21 rows of 4 key/value heads take as long as 24, and 1.55 times as
  long as 16. `afd plan` takes a table of [mixed lengths](../planner-model.md#mixed-lengths). Both
  were served, by 1A1F and by colocated vLLM, and each is predicted with its own table. H100 has no
  table of mixed lengths.

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


_SUMMARY: tuple[tuple[str, str, str, Callable[[Error], bool]], ...] = (
    ("steps, composed", "step_error", "composed", lambda e: not e.retired),
    ("the same, *retired*", "step_error", "composed", lambda e: e.retired),
    (
        "steps of 1A1F, modelled",
        "step_error",
        "modelled",
        lambda e: not (e.colocated or e.counted or e.retired or e.lengths) and e.gpu == H200,
    ),
    (
        "served steps of mixed and of equal lengths, modelled",
        "step_error",
        "modelled",
        lambda e: e.lengths,
    ),
    (
        "the same on 2 x H100",
        "step_error",
        "modelled",
        lambda e: not e.colocated and e.gpu == "h100",
    ),
    (
        "the same, *counted*: routing of random weights",
        "step_error",
        "modelled",
        lambda e: e.counted and not (e.colocated or e.retired),
    ),
    ("the same, *retired*", "step_error", "modelled", lambda e: e.retired),
    ("steps of colocated vLLM, modelled", "step_error", "modelled", lambda e: e.colocated),
    ("ratios, modelled", "ratio_error", "modelled", lambda e: not e.counted),
    ("the same, *counted*", "ratio_error", "modelled", lambda e: e.counted),
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
    lines += ["| cell | predicted | measured | predicted / measured |", "|---|---|---|---|"]
    for error in sorted(ratios, key=lambda error: -error.size):
        lines.append(
            f"| {error.text} | {error.predicted:.2f} | {error.measured:.2f} | {error.ratio:.2f} |"
        )
    for method, title in (("composed", "Steps, composed"), ("modelled", "Steps, modelled")):
        lines += [f"\n## {title}, worst first\n"]
        lines += ["Milliseconds; cells with stage times: per micro-batch and layer.\n"]
        lines += ["| cell | predicted | measured | predicted / measured |", "|---|---|---|---|"]
        steps = [e for name, e in fitted if name == "step_error" and e.method == method]
        for error in sorted(steps, key=lambda error: -error.size):
            lines.append(
                f"| {error.text} | {error.predicted * 1e3:.3f} | {error.measured * 1e3:.3f} |"
                f" {error.ratio:.2f} |"
            )
    return "\n".join(lines) + "\n"


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
