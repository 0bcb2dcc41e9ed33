"""Kernel times that other benches have measured already, as entries of the table. Pure.

``afd bench moe`` draws experts by the number of rows, so its draws can be repeated. ``afd bench gpu
attention`` measures the attention of Step-3.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from afd.records import Record
from afd_bench.moe.shapes import SHAPES
from afd_bench.tables.cells import STAGE, AttentionCell, Cell, ExpertCell
from ffn_worker.moe.tiles import LayerShape

_MOE = re.compile(r"(?P<shape>\S+) (?P<scheme>plain|fp8_block|mxfp4) (?P<rows>\d+) rows graph")
_ATTENTION = re.compile(r"step-3 decode attention, FP8, (?P<rows>\d+)x(?P<context>\d+)")


Drawn = Callable[[LayerShape, int], tuple[int, int]]
"""From a layer and its rows to the (row, expert) pairs on the GPU and the experts that they use."""


def entries_of(
    records: Iterable[Record], gpu: str, drawn: Drawn
) -> dict[str, list[dict[str, Any]]]:
    """Returns the entries by list of the table, of records on a machine with this GPU.

    Each entry names the ``commit`` and ``date`` of its record.
    """
    found: dict[str, dict[Any, dict[str, Any]]] = {"attention": {}, "experts": {}}
    for record in records:
        if not record.machine.endswith(f" x {gpu}"):
            continue
        cells: list[tuple[Cell, dict[str, float]]] = [*_experts(record, drawn), *_attention(record)]
        for cell, more in cells:
            kind = STAGE[type(cell)]
            origin = {"commit": record.commit, "date": record.date}
            us = round(record.value, 2)
            found[kind][cell] = {**asdict(cell), "us": us, **more, **origin}
    return {kind: list(entries.values()) for kind, entries in found.items() if entries}


def _experts(record: Record, drawn: Drawn) -> Iterator[tuple[ExpertCell, dict[str, float]]]:
    match = _MOE.fullmatch(record.case) if record.bench == "moe" else None
    shape = SHAPES.get(match["shape"]) if match else None
    if match is None or shape is None or shape.shared or record.metric != "latency":
        return
    rows = int(match["rows"])
    cell = ExpertCell(
        shape.hidden, shape.width, shape.experts, shape.num_experts, shape.top_k, match["scheme"],
        "fastest", rows,
    )  # fmt: skip
    pairs, used = drawn(shape, rows)
    yield cell, {"pairs": pairs, "used": used}


def _attention(record: Record) -> Iterator[tuple[AttentionCell, dict[str, float]]]:
    match = _ATTENTION.fullmatch(record.case)
    if match and record.metric == "us":
        rows, context = int(match["rows"]), int(match["context"])
        yield AttentionCell("gqa", 64, 1, 256, 256, "fp8", rows, context), {}
