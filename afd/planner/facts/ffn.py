"""What one FFN layer costs: dense or mixture of experts, all gated (gate, up, down)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from afd.errors import ConfigError

_MATRICES = 3  # gate, up, down


@dataclass(frozen=True)
class DenseFfn:
    """A gated MLP of width ``intermediate``; every row uses all of it."""

    hidden: int
    intermediate: int

    @property
    def parameters(self) -> int:
        return _MATRICES * self.hidden * self.intermediate

    @property
    def activated_parameters(self) -> int:
        """Parameters that one row uses."""
        return self.parameters

    @property
    def router_parameters(self) -> int:
        return 0

    @property
    def sparsity(self) -> float:
        return 1.0

    @property
    def top_k(self) -> int:
        return 0

    def flops_per_token(self) -> float:
        return 2.0 * self.parameters

    def touched_parameters(self, rows: float, load: Sequence[float] | None = None) -> float:
        """Parameters read for a batch of ``rows`` rows: all, if there is a row."""
        return self.parameters * min(1.0, rows)


@dataclass(frozen=True)
class MoeFfn:
    """``top_k`` of ``experts`` routed experts of width ``intermediate`` and a shared expert.

    shared_intermediate: joint width of all shared experts (0: none).
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int = 0

    @property
    def expert_parameters(self) -> int:
        return _MATRICES * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        return _MATRICES * self.hidden * self.shared_intermediate

    @property
    def parameters(self) -> int:
        """Routed and shared experts, without the router."""
        return self.experts * self.expert_parameters + self.shared_parameters

    @property
    def activated_parameters(self) -> int:
        return self.top_k * self.expert_parameters + self.shared_parameters

    @property
    def router_parameters(self) -> int:
        """The router stays with attention."""
        return self.hidden * self.experts

    @property
    def sparsity(self) -> float:
        """S: share of the layer's weights that one row uses, shared experts included.

        Step-3 report section 5.3 divides by the routed experts alone in its example and by all of
        them where it counts (footnote 6: 257 experts of DeepSeek-V3); this is the latter.
        """
        return self.activated_parameters / self.parameters

    def flops_per_token(self) -> float:
        return 2.0 * self.activated_parameters

    def expected_experts(self, rows: float, load: Sequence[float] | None = None) -> float:
        """Expected number of distinct routed experts that ``rows`` independent rows use.

        load: share of the chosen slots per expert, summing to 1 (None: even). An expert of share p
        is chosen by a row with probability min(1, top_k * p), as configs/routing measures it.

        Raises:
            ConfigError: ``load`` has another number of experts.
        """
        if load is None:
            chance = self.top_k / self.experts
            return self.experts * (1.0 - (1.0 - chance) ** rows)
        if len(load) != self.experts:
            raise ConfigError(
                f"the routing load has {len(load)} experts, the model has {self.experts}; "
                "measure the load with this model"
            )
        chances = np.minimum(1.0, self.top_k * np.asarray(load, dtype=np.float64))
        return float(np.sum(1.0 - (1.0 - chances) ** rows))

    def touched_parameters(self, rows: float, load: Sequence[float] | None = None) -> float:
        """Parameters read for ``rows`` rows: the distinct experts and the shared one."""
        routed = self.expected_experts(rows, load) * self.expert_parameters
        return routed + self.shared_parameters * min(1.0, rows)


Ffn = DenseFfn | MoeFfn
