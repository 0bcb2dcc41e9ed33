"""How wrong the model's ratio of xAyF to colocated serving may be, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from afd_planner.cost.kernels import measured_kernels
from afd_planner.cost.shape import Efficiency, calibrated
from afd_planner.sizing.request import Request


class Decision(Enum):
    """DISAGGREGATE and COLOCATED hold within the model's error; UNDECIDED is within it."""

    DISAGGREGATE = "disaggregate"
    COLOCATED = "colocated"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class ErrorBand:
    """Predicted over measured ratio of xAyF to colocated serving.

    Attributes:
        low, high: Lowest and highest value.
        basis: What was measured.
    """

    low: float
    high: float
    basis: str

    def within(self, ratio: float) -> tuple[float, float]:
        """Returns the lowest and highest true ratio for a predicted one."""
        return ratio / self.high, ratio / self.low

    def decide(self, ratio: float) -> Decision:
        """Returns the decision for a predicted ratio; 0 without an xAyF plan, inf without other."""
        lowest, highest = self.within(ratio)
        if lowest >= 1:
            return Decision.DISAGGREGATE
        return Decision.COLOCATED if highest <= 1 else Decision.UNDECIDED


CELLS = "22 measured cells on 2 H200 or 2 H100, docs/results/planner.md"

CALIBRATED_ERROR = ErrorBand(1 / 1.52, 1.52, f"largest error in {CELLS}")
"""Of measured kernels, on an accelerator whose efficiencies were fitted to measurements. The
largest errors are of cells whose rows all choose the same few experts; of the others, 1.10."""

MODEL_ERROR = ErrorBand(1 / 1.67, 1.67, f"largest error of rooflines in {CELLS}")
"""Of rooflines: where efficiencies were not fitted, and for models whose products around attention
were not measured. Where rows choose experts by chance it is 1.26, but no cell is of an accelerator
without fitted efficiencies."""

COMPOSED_ERROR = ErrorBand(
    1 / 1.19,
    1.19,
    "composed steps are within 10 % in 55 of 55 cells on H200, docs/results/planner.md",
)
"""With measured times of attention and experts: both plans off by 9 %, in opposite directions."""


def error_of(request: Request) -> ErrorBand:
    """Returns the error of the ratio that the model predicts for a request."""
    measured = request.measured
    if measured is not None and measured.attention is not None and measured.ffn is not None:
        return COMPOSED_ERROR
    accelerators = (*request.attention, *request.ffn)
    lengths = request.efficiency.equal_lengths
    fitted = replace(calibrated(accelerators), kernels=False, equal_lengths=lengths)
    if not request.roofline == fitted != Efficiency(equal_lengths=lengths):
        return MODEL_ERROR
    measured_products = request.efficiency.kernels and all(
        "projections" in measured_kernels(gpu.name, request.model, request.precision)
        for gpu in accelerators
    )
    return CALIBRATED_ERROR if measured_products else MODEL_ERROR
