"""The cells of docs/results that the planner can be compared with. Pure.

Four kinds:
- a step of 1A1F, timed on the devices, with or without times of its stages (gpu.json, host.json);
- the best colocated vLLM on the same two GPUs, by its tokens/s;
- the ratio of the two, by their tokens/s at the best depth;
- a served step with mixed and one with equal lengths (`afd bench gpu lengths`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from afd.records import Record
from afd_bench.gpu.common import TOKENS
from afd_bench.gpu.targets import PEER, Afd, Colocated, Target

GPUS = 2
H200 = "h200"
"""What docs/results/gpu.md measured on."""
AFD = Afd(1, 1)
COLOCATED = {
    # model, layers -> the targets that docs/results/gpu.md measured
    ("qwen3-30b", 12): (Colocated(2), Colocated(1, 2)),
    ("qwen3-30b", 48): (Colocated(2),),
    ("qwen3-30b-coarse-mqa", 12): (Colocated(1, 2),),
    ("qwen3-30b-coarse-mqa", 24): (Colocated(2), Colocated(1, 2)),
}

_CASE = re.compile(
    r"(?P<model>\S+) (?P<layers>\d+) layers (?P<kv>fp8 cache )?(?P<even>even routing )?"
    r"1A1F exact (?P<mqa>mqa )?(?P<ahead>lookahead )?depth (?P<depth>\d)"
    r" batch (?P<batch>\d+) context (?P<context>\d+)"
)
_LENGTHS_CASE = re.compile(
    r"(?P<model>\S+) (?P<layers>\d+) layers (?P<kv>fp8 cache )?(?P<even>even routing )?"
    r"(?:TP1 graphs|1A1F exact lookahead depth (?P<depth>\d))"
    r" batch (?P<batch>\d+) context (?P<context>\d+) mixed lengths"
)
_GPU = re.compile(r"2 x NVIDIA (H\d+)")
"""In what a record says of its machine."""
_HOST_CASE = re.compile(
    r"(?P<layers>\d+) (?P<batch>\d+) 2 x NVIDIA"
    r" (?:H100 80GB HBM3|H200(?P<one> depth 1)? context (?P<context>\d+))"
)
"""Of `afd bench gpu host`. Not those of H100 with a context: other deployments used its GPUs."""
_HOST_MODEL = "qwen3-30b"
_HOST_CONTEXT, _HOST_STEPS = 64, 250
"""Defaults of that bench: tokens of a prompt, and measured steps, each a token of an answer."""
_STEPS = re.compile(r"--steps (\d+)")
_STAGES = ("attention_us", "to_ffn_us", "ffn_us", "to_attention_us")


@dataclass(frozen=True)
class Place:
    """What ran: a model slice, its cache, requests and tokens per request; on which kind of GPU.

    context: tokens of a prompt. even: chance chose each row's experts (``--routing even``), not the
    router of random weights. measured_tokens: mean tokens of a request while it was measured, its
    answer included; 0 if nobody recorded them.
    """

    model: str
    layers: int
    kv: str
    requests: int
    context: int
    gpu: str = H200
    even: bool = False
    measured_tokens: float = field(default=0.0, compare=False)

    @property
    def tokens(self) -> float:
        """Tokens per request that a step reads."""
        return self.measured_tokens or self.context

    @property
    def text(self) -> str:
        cache = "" if self.kv == "bfloat16" else f", {self.kv} cache"
        cache += ", even routing" if self.even else ""
        return (
            f"{self.model}, {self.layers} layers{cache}, {self.requests} requests of"
            f" {self.context} tokens" + ("" if self.gpu == H200 else f" on {self.gpu}")
        )


@dataclass(frozen=True)
class StepCell:
    """A measured step of 1A1F on two GPUs.

    Attributes:
        seconds: Of a step on the devices, or per micro-batch and layer (``position``).
        stages: Seconds of (attention, to FFN, FFN, to attention) per micro-batch and layer.
        position: ``seconds`` is a step divided by its layers with experts and micro-batches.
        served: ``seconds`` is the time per token of a server with ``pipeline.lookahead``. It has
            the logits, the sampling and what the host does not hide, which a step on the devices
            has not.
    """

    place: Place
    depth: int
    seconds: float
    stages: tuple[float, float, float, float] | None = None
    position: bool = False
    served: bool = False

    @property
    def text(self) -> str:
        served = ", served" if self.served else ""
        return f"{self.place.text}, 1A1F depth {self.depth}{served}"


@dataclass(frozen=True)
class RatioCell:
    """Tokens/s of the best depth of 1A1F over those of the best colocated vLLM, both served.

    colocated_s: seconds of a step of the colocated server, its host included.
    """

    place: Place
    depths: tuple[int, ...]
    ratio: float
    colocated_s: float


@dataclass(frozen=True)
class LengthsCell:
    """Served steps of as many requests in decode: all equally long, and of half to one and a half
    times that.

    depth: 0 for colocated vLLM, on one GPU. equal_s, mixed_s: seconds of a step.
    """

    place: Place
    depth: int
    equal_s: float
    mixed_s: float

    @property
    def target(self) -> Target:
        return AFD if self.depth else Colocated(1)

    @property
    def text(self) -> str:
        server = f"1A1F depth {self.depth}, served" if self.depth else "colocated vLLM on one GPU"
        return f"{self.place.text}, {server}"


def step_cells(records: Sequence[Record]) -> list[StepCell]:
    """Returns every step that was timed on the devices, and in the server at the same time."""
    stages: dict[str, dict[str, Record]] = {}
    found = []
    tokens = _tokens(records)
    for record in records:
        match = _CASE.fullmatch(record.case)
        if match is None or record.bench != "gpu":
            continue
        if record.metric == "device_step_ms":
            place, depth = _place(match, record, tokens), int(match["depth"])
            found.append(StepCell(place, depth, record.value / 1e3))
            found.append(StepCell(place, depth, record.peer_value / 1e3, served=True))
        elif record.metric in _STAGES:
            stages.setdefault(record.case, {})[record.metric] = record
    for case, by_name in stages.items():
        match = _CASE.fullmatch(case)
        if match is None or set(by_name) != set(_STAGES):
            continue
        attention, out, ffn, back = (by_name[name].value / 1e6 for name in _STAGES)
        found.append(
            StepCell(
                _place(match, by_name["ffn_us"], tokens),
                int(match["depth"]),
                by_name["ffn_us"].peer_value / 1e6,
                (attention, out, ffn, back),
                position=True,
            )
        )
    return found


def host_cells(records: Iterable[Record]) -> list[StepCell]:
    """Returns every step of `afd bench gpu host`, on the devices and served."""
    found = []
    for record in records:
        match = _HOST_CASE.fullmatch(record.case)
        if match is None or record.metric != "step_ms":
            continue
        told = _STEPS.search(record.command)
        answered = int(told[1] if told else _HOST_STEPS) / 2
        context, depth = int(match["context"] or _HOST_CONTEXT), 1 if match["one"] else 2
        place = Place(
            _HOST_MODEL,
            int(match["layers"]),
            "bfloat16",
            int(match["batch"]),
            context,
            H200 if match["context"] else "h100",
            measured_tokens=context + answered,
        )
        found.append(StepCell(place, depth, record.peer_value / 1e3))
        found.append(StepCell(place, depth, record.value / 1e3, served=True))
    return found


def lengths_cells(records: Iterable[Record]) -> list[LengthsCell]:
    """Returns every cell of `afd bench gpu lengths`."""
    found = []
    for record in records:
        match = _LENGTHS_CASE.fullmatch(record.case)
        if match is None or record.metric != "step_ms":
            continue
        depth = int(match["depth"] or 0)
        equal_s, mixed_s = record.peer_value / 1e3, record.value / 1e3
        found.append(LengthsCell(_place(match, record, {}), depth, equal_s, mixed_s))
    return found


def ratio_cells(records: Sequence[Record]) -> list[RatioCell]:
    """Returns every cell with both servers, with ``pipeline.lookahead`` where it was measured."""
    rates: dict[Place, dict[int, Record]] = {}
    tokens = _tokens(records)
    for record in records:
        match = _CASE.fullmatch(record.case)
        if match is None or record.metric != "tokens_per_s_per_gpu" or record.peer != PEER:
            continue
        if match["ahead"]:
            rates.setdefault(_place(match, record, tokens), {})[int(match["depth"])] = record
    return [_ratio(place, by_depth) for place, by_depth in rates.items()]


def _ratio(place: Place, by_depth: Mapping[int, Record]) -> RatioCell:
    best = max(by_depth.values(), key=lambda record: record.value)
    return RatioCell(
        place,
        tuple(sorted(by_depth)),
        best.value / best.peer_value,
        place.requests / best.peer_value / GPUS,
    )


def _tokens(records: Sequence[Record]) -> dict[str, float]:
    """Returns the tokens of a request by case, where they were recorded."""
    return {record.case: record.value for record in records if record.metric == TOKENS}


def _place(match: re.Match[str], record: Record, tokens: Mapping[str, float]) -> Place:
    gpu = _GPU.search(record.machine)
    return Place(
        match["model"],
        int(match["layers"]),
        "fp8" if match["kv"] else "bfloat16",
        int(match["batch"]),
        int(match["context"]),
        gpu[1].lower() if gpu else H200,
        even=match["even"] is not None,
        measured_tokens=tokens.get(record.case, 0.0),
    )


def alike_places(cells: Iterable[StepCell | RatioCell]) -> frozenset[Place]:
    """Returns the places that were measured with even routing too.

    Random weights may send all rows of theirs to the same few experts, which no plan assumes.
    """
    places = {cell.place for cell in cells}
    return frozenset(
        place for place in places if not place.even and replace(place, even=True) in places
    )


def stage_tables(cells: Sequence[StepCell]) -> dict[tuple[object, ...], StepCell]:
    """Returns the cells with stage times by what decides them: all but the number of layers.

    Of several, the last: it is the newest code.
    """
    return {stage_key(cell): cell for cell in cells if cell.stages is not None}


def stage_key(cell: StepCell) -> tuple[object, ...]:
    """Returns GPU, model, routing, cache, requests, context and depth of a cell."""
    place = cell.place
    return place.gpu, place.model, place.even, place.kv, place.requests, place.context, cell.depth
