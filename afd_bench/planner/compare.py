"""Predictions of the cost model for measured cells, and their errors. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from afd_bench.gpu.checkpoint import listing
from afd_bench.gpu.predict import Prediction, predict
from afd_bench.gpu.slices import find
from afd_bench.gpu.targets import Target
from afd_bench.planner.cells import (
    AFD,
    COLOCATED,
    H200,
    LengthsCell,
    Place,
    RatioCell,
    StepCell,
    stage_key,
)
from afd_planner.cost.disaggregated import afd_stages
from afd_planner.cost.shape import AfdShape, Efficiency, Pool
from afd_planner.cost.stages import AfdStages, Part, StageTime, layers_seconds, step_seconds
from afd_planner.facts.hardware import load_accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import from_config
from afd_planner.facts.precision import PRECISIONS

Method = Literal["modelled", "composed"]
"""modelled: from data sheets and efficiencies. composed: from stage times measured at the same
batch, by the pipeline's formula; what has no stage time (dense layers, rest of a step) is
modelled."""


@dataclass(frozen=True)
class Error:
    """A predicted and a measured value of one cell.

    alike: random weights sent its rows to few experts, where the prediction has even routing.
    colocated: of colocated vLLM alone. lengths: of a cell that compares mixed with equal lengths.
    gpu: what it was measured on.
    """

    cell: str
    method: Method
    predicted: float
    measured: float
    alike: bool = False
    colocated: bool = False
    lengths: bool = False
    gpu: str = H200

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted / self.measured

    @property
    def size(self) -> float:
        """Factor by which the prediction is off, at least 1."""
        return max(self.ratio, 1 / self.ratio)


@cache
def model_of(name: str, layers: int) -> ModelSpec:
    """Returns the slice of a model as the planner sees it."""
    return from_config(listing(find(name, layers))[0], name)


def modelled_step(cell: StepCell, efficiency: Efficiency) -> float:
    """Returns the predicted seconds of the cell, per position if the cell is.

    A step on the devices is its layers: vLLM computes logits and samples after the replayed graph.
    """
    said = _prediction(AFD, cell.depth, cell.place, efficiency)
    seconds = said.tpot_s if cell.served else said.layers_s
    model = model_of(cell.place.model, cell.place.layers)
    return seconds / (positions(model, cell.depth) if cell.position else 1)


def _prediction(target: Target, depth: int, place: Place, efficiency: Efficiency) -> Prediction:
    model, gpu = model_of(place.model, place.layers), load_accelerator(place.gpu)
    return predict(target, depth, place.requests, place.tokens, model, gpu, efficiency, place.kv)


def composed_step(cell: StepCell, source: StepCell, efficiency: Efficiency) -> float:
    """Returns the seconds of the cell's step, composed from the stage times of ``source``.

    The attention time of ``source`` is all of the attention side's work over the positions of its
    step. Its dense layers are modelled, and taken out of it first.
    """
    assert source.stages is not None
    attention, out, ffn, back = source.stages
    measured = modelled_stages(source, efficiency)
    beside = sum(
        source.depth * len(group.layers) * group.attention.seconds
        for group in measured.groups
        if group.ffn is None
    )
    model = model_of(source.place.model, source.place.layers)
    own = attention - beside / positions(model, source.depth)
    stages = modelled_stages(cell, efficiency)
    groups = tuple(
        group
        if group.ffn is None
        else replace(group, attention=_flat(own), ffn=_flat(ffn), to_ffn=out, to_attention=back)
        for group in stages.groups
    )
    seconds = (step_seconds if cell.served else layers_seconds)(
        replace(stages, groups=groups), cell.depth
    )
    count = positions(model_of(cell.place.model, cell.place.layers), cell.depth)
    return seconds / (count if cell.position else 1)


def modelled_stages(cell: StepCell, efficiency: Efficiency) -> AfdStages:
    """Returns the predicted stages of a cell."""
    place = cell.place
    pool = Pool(load_accelerator(place.gpu), 1, 1)
    precision = replace(PRECISIONS["bf16"], kv=place.kv)
    rows = place.requests / cell.depth
    shape = AfdShape(pool, pool, cell.depth, rows, place.tokens, precision)
    return afd_stages(model_of(place.model, place.layers), shape, efficiency)


def _flat(seconds: float) -> StageTime:
    return StageTime((Part("measured", seconds, 0.0),), measured=True)


def positions(model: ModelSpec, depth: int) -> int:
    """Returns the (layer, micro-batch) pairs of a step whose experts are remote."""
    return len(model.moe_layers) * depth


def colocated_step_s(place: Place, efficiency: Efficiency) -> float:
    """Returns the predicted seconds of a step of the best colocated vLLM that was measured."""
    return min(
        _prediction(target, 1, place, efficiency).tpot_s
        for target in COLOCATED[place.model, place.layers]
    )


def step_errors(
    cells: Sequence[StepCell],
    tables: Mapping[tuple[object, ...], StepCell],
    alike: Collection[Place],
    efficiency: Callable[[str], Efficiency],
) -> list[Error]:
    """Returns the errors of every step, modelled, and composed where stages were measured.

    efficiency: of a GPU's name.
    """
    found = []
    for cell in cells:
        of_gpu = efficiency(cell.place.gpu)
        seconds = modelled_step(cell, of_gpu)
        error = Error(
            cell.text,
            "modelled",
            seconds,
            cell.seconds,
            alike=cell.place in alike,
            gpu=cell.place.gpu,
        )
        found.append(error)
        source = cell if cell.stages else tables.get(stage_key(cell))
        if source is not None:
            seconds = composed_step(cell, source, of_gpu)
            found.append(replace(error, method="composed", predicted=seconds))
    return found


def colocated_errors(
    cells: Sequence[RatioCell], alike: Collection[Place], efficiency: Callable[[str], Efficiency]
) -> list[Error]:
    """Returns the errors of the colocated steps, whose measured times include the host."""
    return [
        Error(
            f"{cell.place.text}, colocated vLLM",
            "modelled",
            colocated_step_s(cell.place, efficiency(cell.place.gpu)),
            cell.colocated_s,
            alike=cell.place in alike,
            colocated=True,
            gpu=cell.place.gpu,
        )
        for cell in cells
    ]


def lengths_errors(
    cells: Sequence[LengthsCell], efficiency: Callable[[str], Efficiency]
) -> list[Error]:
    """Returns the errors of the steps with mixed and with equal lengths."""
    found = []
    for cell in cells:
        for word, equal, measured in (
            ("mixed", False, cell.mixed_s),
            ("equal", True, cell.equal_s),
        ):
            chosen = replace(efficiency(cell.place.gpu), equal_lengths=equal)
            said = _prediction(cell.target, cell.depth, cell.place, chosen)
            text = f"{cell.text}, {word} lengths"
            found.append(Error(text, "modelled", said.tpot_s, measured, lengths=True))
    return found


def ratio_errors(
    cells: Sequence[RatioCell], alike: Collection[Place], efficiency: Callable[[str], Efficiency]
) -> list[Error]:
    """Returns the errors of the ratio of 1A1F at its best depth to colocated vLLM."""
    found = []
    for cell in cells:
        place, of_gpu = cell.place, efficiency(cell.place.gpu)
        steps = [
            modelled_step(StepCell(place, depth, 0.0, served=True), of_gpu) for depth in cell.depths
        ]
        ratio = colocated_step_s(place, of_gpu) / min(steps)
        found.append(
            Error(
                place.text,
                "modelled",
                ratio,
                cell.ratio,
                alike=place in alike,
                gpu=place.gpu,
            )
        )
    return found
