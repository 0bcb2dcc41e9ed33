"""The README's table of measured numbers, and a check that it has no others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from afd.errors import AfdError
from afd.records import Record

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True)
class Row:
    """One row: a sentence and the record that holds its numbers.

    file: below docs/results. case, metric, peer: of the record. digits: of the two values.
    """

    what: str
    file: str
    bench: str
    case: str
    metric: str
    peer: str
    digits: int = 0


ROWS: tuple[Row, ...] = (
    Row(
        "Same greedy tokens as colocated vLLM, 2A2F, depth 3, float32, CPU (fraction of requests)",
        "identity.json", "identity", "deepseek_v3 float32 2A2F depth3", "match",
        "vllm-cpu colocated", 3,
    ),
    Row(
        "Throughput, 1A1F on 2 CPU cores, batch 32, depth 2",
        "cpu.json", "cpu", "qwen3_moe bench bfloat16 1A1F batch32 depth2", "tokens_per_s",
        "vllm-cpu colocated",
    ),
    Row(
        "Expert layer of Qwen3-30B-A3B, FP8, 1,024 rows, replayed",
        "moe.json", "moe", "qwen3-30b-a3b fp8_block 1024 rows graph", "latency", "vllm",
    ),
    Row(
        "Decode attention of Step-3, FP8 cache, one request of 32,768 tokens",
        "attention.json", "attention", "step-3 decode attention, FP8, 1x32768", "us",
        "FlashAttention 3", 1,
    ),
    Row(
        "Top-1 agreement with eager colocated vLLM, 1A1F on one H200, graphs, our expert kernels",
        "gpu.json", "gpu", "tiny 4 layers 1A1F exact on 1 GPUs depth 3", "top1",
        "vllm colocated", 3,
    ),
    Row(
        "The same with vLLM's expert kernels (`ffn.backend: vllm_cuda`)",
        "gpu.json", "gpu", "tiny 4 layers 1A1F exact on 1 GPUs backend vllm_cuda depth 3", "top1",
        "vllm colocated", 3,
    ),
)  # fmt: skip
"""At most six, losses included."""

_NUMBER = re.compile(
    r"\b\d[\d.,]*\s*(?:times|x\b|%|us\b|ms\b|s\b|seconds\b|tokens/s|GB/s|GiB/s|TFLOP)"
)
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def table(rows: Sequence[Row], found: Mapping[str, Sequence[Record]]) -> str:
    """Markdown table of the rows. found: records by file.

    Raises:
        AfdError: no record holds a row.
    """
    lines = ["| | ours | peer | ratio | measured on |", "|---|---|---|---|---|"]
    for row in rows:
        record = _record(row, found)
        lines.append(
            f"| {row.what} | {_value(record.value, record.unit, row.digits)}"
            f" | {record.peer}: {_value(record.peer_value, record.unit, row.digits)}"
            f" | {record.ratio:.2f} | {record.machine}, {record.commit} |"
        )
    return "\n".join(lines)


def insert(text: str, rendered: str) -> str:
    """``text`` with the table between the two marks. Raises AfdError where a mark is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise AfdError(f"README.md needs the lines {BEGIN} and {END}")
    return f"{before}{BEGIN}\n{rendered}\n{END}{after}"


def unrecorded(text: str) -> list[str]:
    """Measured numbers outside of the table and of code: no record vouches for them."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return [
        match.group(0)
        for part in (before, after)
        for match in _NUMBER.finditer(_CODE.sub("", part))
    ]


def _record(row: Row, found: Mapping[str, Sequence[Record]]) -> Record:
    wanted = row.bench, row.case, row.metric, row.peer
    for record in found.get(row.file, ()):
        if record.key == wanted:
            return record
    raise AfdError(f"no record in docs/results/{row.file} holds the README's row {wanted}")


def _value(value: float, unit: str, digits: int) -> str:
    return f"{value:,.{digits}f} {unit}".strip()
