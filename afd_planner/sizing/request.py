"""A request to the planner: model, accelerators, contexts, TPOT limit and budget."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from afd.errors import ConfigError
from afd_planner.cost.measured import MeasuredTimes
from afd_planner.cost.shape import Efficiency
from afd_planner.facts.hardware import Accelerator
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.precision import PRECISIONS, Precision, wire_formats
from afd_planner.sizing.context import ContextMix
from afd_planner.sizing.imbalance import ExpertSpread, load_spread
from afd_planner.sizing.layout import AfdLayout, ColocatedLayout, Layout

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
        wires: Wire formats to search; those that the model's width excludes are left out.
        depths: Numbers of micro-batches in flight to search.
        redundant: Copies of experts per expert group and layer to search, in both plans.
        spread: How uneven expert loads are.
        measured: Stage times that replace the roofline where available.
        layouts: Stated deployments, at most one of each kind; a kind without one is searched.
        batch: Sequences in flight in a stated deployment, whatever its TPOT; None: as many as the
            TPOT allows.
    """

    model: ModelSpec
    attention: tuple[Accelerator, ...]
    ffn: tuple[Accelerator, ...]
    context: ContextMix
    tpot_s: float = 0.050
    gpus: int | None = None
    tokens_per_s: float | None = None
    precision: Precision = PRECISIONS["fp8"]
    accepted: float = 1.0
    positions: int = 1
    wires: tuple[str, ...] = ("exact", "fp8")
    depths: tuple[int, ...] = (1, 2, 3)
    redundant: tuple[int, ...] = (0, 1)
    efficiency: Efficiency = field(default_factory=Efficiency)
    spread: ExpertSpread = field(default_factory=load_spread)
    measured: MeasuredTimes | None = None
    layouts: tuple[Layout, ...] = ()
    batch: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.tpot_s < 60:
            raise ConfigError(
                f"a TPOT of {self.tpot_s * 1e3:g} ms is out of range; give 1 to 60000 ms"
            )
        if not 1 <= self.accepted <= self.positions < math.inf:
            raise ConfigError(
                f"{self.accepted:g} accepted tokens per step are not between 1 and the"
                f" {self.positions} computed ones; raise --draft-tokens or lower --accepted"
            )
        if self.gpus is not None and self.gpus < 1:
            raise ConfigError(f"a budget of {self.gpus} GPUs is too small; give at least 1")
        if self.tokens_per_s is not None and not 0 < self.tokens_per_s < math.inf:
            raise ConfigError(
                f"a target of {self.tokens_per_s:g} tokens/s is invalid; give a number above 0"
            )
        if len({type(layout) for layout in self.layouts}) < len(self.layouts):
            raise ConfigError("give at most one xAyF and one colocated --layout")
        if self.batch is not None and (self.batch < 1 or not self.layouts):
            raise ConfigError("--batch needs a --layout, and at least 1 sequence")
        if not self.usable_wires:
            raise ConfigError(
                f"rows of {self.model.title} have {self.model.hidden} columns, which wire format"
                f" {self.wires[0]} cannot divide into blocks; give --wire exact"
            )
        if self.gpus is not None and self.tokens_per_s is not None:
            raise ConfigError("give a GPU budget or a target of tokens/s, not both")
        longest = self.model.max_context
        if longest and self.context.longest > longest:
            raise ConfigError(
                f"{self.model.title} reads at most {longest} tokens, but the longest context is"
                f" {self.context.longest:.0f}; give contexts of up to {longest}"
            )

    @cached_property
    def roofline(self) -> Efficiency:
        """The efficiencies without measured kernels: those of which stage times are lines in rows.

        ``sizing.factors`` has the factors of the kernels, which are no lines.
        """
        return replace(self.efficiency, kernels=False)

    @property
    def afd_layout(self) -> AfdLayout | None:
        """The stated xAyF deployment."""
        return next((each for each in self.layouts if isinstance(each, AfdLayout)), None)

    @property
    def colocated_layout(self) -> ColocatedLayout | None:
        """The stated colocated deployment."""
        return next((each for each in self.layouts if isinstance(each, ColocatedLayout)), None)

    @property
    def usable_wires(self) -> tuple[str, ...]:
        """The wire formats to search that the model's rows allow."""
        allowed = wire_formats(self.model.hidden)
        return tuple(wire for wire in self.wires if wire in allowed)

    @property
    def exchange_precision(self) -> Precision:
        """Formats of a colocated plan: its all-to-all sends FP8 rows where the width allows it."""
        allowed = wire_formats(self.model.hidden)
        return replace(self.precision, wire="fp8" if "fp8" in allowed else "exact")

    @property
    def objective(self) -> Objective:
        """``tokens`` (most tokens/s) for a budget of one kind of GPU, else ``cost`` (least USD per
        token)."""
        kinds = {accelerator.name for accelerator in (*self.attention, *self.ffn)}
        return "tokens" if self.gpus is not None and len(kinds) == 1 else "cost"
