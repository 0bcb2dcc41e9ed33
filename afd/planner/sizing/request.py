"""What a plan is asked for: model, accelerators, contexts, service level and budget. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from afd.errors import ConfigError
from afd.planner.cost.measured import MeasuredTimes
from afd.planner.cost.shape import Efficiency
from afd.planner.facts.hardware import Accelerator
from afd.planner.facts.model import ModelSpec
from afd.planner.facts.precision import Precision
from afd.planner.sizing.context import ContextMix
from afd.planner.sizing.imbalance import ExpertSpread, load_spread

Objective = Literal["tokens", "cost"]

MAX_UNIT_GPUS = 256
"""GPUs of the largest single xAyF unit or EP group that is searched; more GPUs run copies of it."""


@dataclass(frozen=True)
class Request:
    """One question to the planner.

    Attributes:
        attention, ffn: accelerators that each pool may use, at least one.
        tpot_s: most seconds between two tokens of a request.
        gpus: GPUs at hand, None for no limit. tokens_per_s: output tokens per second wanted, None
            for as many as the GPUs give. At most one of the two.
        accepted: tokens that a sequence gains per step (1 without speculative decoding).
        positions: tokens computed per sequence and step, 1 + draft tokens; experts, projections and
            the wire see that many rows, while the KV cache is read once (Step-3 report, 5.2).
        wires: wire formats to choose from. depths: micro-batches in flight to choose from.
        spread: how unevenly experts are loaded.
        measured: stage times to use in place of the roofline where the file has them.
    """

    model: ModelSpec
    attention: tuple[Accelerator, ...]
    ffn: tuple[Accelerator, ...]
    context: ContextMix
    tpot_s: float = 0.050
    gpus: int | None = None
    tokens_per_s: float | None = None
    precision: Precision = field(default_factory=Precision)
    accepted: float = 1.0
    positions: int = 1
    wires: tuple[str, ...] = ("exact", "fp8")
    depths: tuple[int, ...] = (1, 2, 3)
    efficiency: Efficiency = field(default_factory=Efficiency)
    spread: ExpertSpread = field(default_factory=load_spread)
    measured: MeasuredTimes | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tpot_s < 60:
            raise ConfigError(
                f"a TPOT of {self.tpot_s * 1e3:g} ms is not a service level; give 1 to 60000 ms"
            )
        if not 1 <= self.accepted <= self.positions:
            raise ConfigError(
                f"{self.accepted:g} accepted tokens per step need between 1 and {self.positions}"
                f" computed ones; raise the number of draft tokens or lower the accepted ones"
            )
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"a budget of {self.gpus} GPUs holds no model; give at least 1")
        if self.tokens_per_s is not None and not self.tokens_per_s > 0:
            raise ConfigError(f"{self.tokens_per_s:g} tokens/s is no target; give more than 0")
        if self.gpus is not None and self.tokens_per_s is not None:
            raise ConfigError("give a GPU budget or a target of tokens/s, not both")
        longest = self.model.max_context
        if longest and self.context.longest > longest:
            raise ConfigError(
                f"{self.model.title} reads at most {longest} tokens, but the longest context asked"
                f" for is {self.context.longest:.0f}; give contexts up to {longest}"
            )

    @property
    def objective(self) -> Objective:
        """``tokens`` (most tokens/s from the GPUs at hand) where a budget of one kind of GPU is
        given, else ``cost`` (fewest USD per token)."""
        kinds = {accelerator.name for accelerator in (*self.attention, *self.ffn)}
        return "tokens" if self.gpus is not None and len(kinds) == 1 else "cost"

    @property
    def unit_gpus(self) -> int:
        """GPUs of the largest unit to look at."""
        return min(self.gpus or MAX_UNIT_GPUS, MAX_UNIT_GPUS)
