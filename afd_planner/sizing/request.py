"""A request to the planner: model, accelerators, contexts, TPOT limit and budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from afd.errors import ConfigError
from afd_planner.cost.measured import MeasuredTimes
from afd_planner.cost.shape import Efficiency
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.precision import Precision
from afd_planner.sizing.context import ContextMix
from afd_planner.sizing.imbalance import ExpertSpread, load_spread

Objective = Literal["tokens", "cost"]

MAX_UNIT_GPUS = 256
"""GPUs of the largest unit that is searched; larger budgets run copies of a unit."""


@dataclass(frozen=True)
class Request:
    """A request to the planner.

    Attributes:
        attention, ffn: Accelerators that each pool may use, at least one.
        tpot_s: Limit of the seconds between two tokens of a request.
        gpus: Available GPUs, None for no limit. Excludes ``tokens_per_s``.
        tokens_per_s: Required output tokens per second, None for as many as the GPUs can produce.
        accepted: Tokens that a sequence gains per step; 1 without speculative decoding.
        positions: Tokens computed per sequence and step, 1 + draft tokens. Experts, projections and
            wire process that many rows; the KV cache is read once (Step-3 report section 5.2).
        wires: Wire formats to search.
        depths: Numbers of micro-batches in flight to search.
        spread: How uneven expert loads are.
        measured: Stage times that replace the roofline where available.
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
                f"a TPOT of {self.tpot_s * 1e3:g} ms is out of range; give 1 to 60000 ms"
            )
        if not 1 <= self.accepted <= self.positions:
            raise ConfigError(
                f"{self.accepted:g} accepted tokens per step are not between 1 and the"
                f" {self.positions} computed ones; raise --draft-tokens or lower --accepted"
            )
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"a budget of {self.gpus} GPUs is too small; give at least 1")
        if self.tokens_per_s is not None and not self.tokens_per_s > 0:
            raise ConfigError(
                f"a target of {self.tokens_per_s:g} tokens/s is invalid; give more than 0"
            )
        if self.gpus is not None and self.tokens_per_s is not None:
            raise ConfigError("give a GPU budget or a target of tokens/s, not both")
        longest = self.model.max_context
        if longest and self.context.longest > longest:
            raise ConfigError(
                f"{self.model.title} reads at most {longest} tokens, but the longest context is"
                f" {self.context.longest:.0f}; give contexts of up to {longest}"
            )

    @property
    def objective(self) -> Objective:
        """``tokens`` (most tokens/s) for a budget of one kind of GPU, else ``cost`` (least USD per
        token)."""
        kinds = {accelerator.name for accelerator in (*self.attention, *self.ffn)}
        return "tokens" if self.gpus is not None and len(kinds) == 1 else "cost"
