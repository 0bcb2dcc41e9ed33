"""How wrong the model's ratio of xAyF to colocated serving may be, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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


MODEL_ERROR = ErrorBand(0.82, 1.30, "13 measured cells on 2 H200, docs/results/planner.md")
"""Of the roofline with its default efficiencies. ``afd bench planner`` measures it."""
