"""Cost of one FFN layer, dense or mixture of experts. All FFNs are gated (gate, up, down)."""

from dataclasses import dataclass

from afd.errors import ConfigError

_MATRICES = 3  # gate, up, down


@dataclass(frozen=True)
class DenseFfn:
    """A gated MLP of width ``intermediate``. Every row uses all its weights."""

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

    def touched_parameters(self, rows: float) -> float:
        """Returns the parameters read for ``rows`` rows, which may be a fraction of 1."""
        return self.parameters * min(1.0, rows)


@dataclass(frozen=True)
class MoeFfn:
    """A mixture of experts: each row uses ``top_k`` of ``experts`` routed experts.

    Attributes:
        intermediate: Width of a routed expert.
        shared_intermediate: Total width of all shared experts; 0 for none.
    """

    hidden: int
    intermediate: int
    experts: int
    top_k: int
    shared_intermediate: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.experts:
            raise ConfigError(
                f"a row cannot use {self.top_k} of {self.experts} experts; check the number of"
                " experts and of experts per token in config.json"
            )

    @property
    def expert_parameters(self) -> int:
        return _MATRICES * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        return _MATRICES * self.hidden * self.shared_intermediate

    @property
    def parameters(self) -> int:
        """Parameters of routed and shared experts, excluding the router."""
        return self.experts * self.expert_parameters + self.shared_parameters

    @property
    def activated_parameters(self) -> int:
        return self.top_k * self.expert_parameters + self.shared_parameters

    @property
    def router_parameters(self) -> int:
        """Parameters of the router, which runs in the attention pool."""
        return self.hidden * self.experts

    @property
    def sparsity(self) -> float:
        """S: share of the layer's weights that one row uses, shared experts included.

        The example in section 5.3 of the Step-3 report divides by the routed experts only. Its
        results (footnote 6: 257 experts of DeepSeek-V3) divide by all experts, as done here.
        """
        return self.activated_parameters / self.parameters

    def flops_per_token(self) -> float:
        return 2.0 * self.activated_parameters

    def expected_experts(self, rows: float) -> float:
        """Returns the expected number of distinct routed experts that ``rows`` rows use.

        Rows choose independently, and each expert as often as any other.
        """
        chance = self.top_k / self.experts
        return float(self.experts * (1.0 - (1.0 - chance) ** rows))

    def touched_parameters(self, rows: float) -> float:
        """Returns the parameters read for ``rows`` rows: distinct experts and shared experts."""
        routed = self.expected_experts(rows) * self.expert_parameters
        return routed + self.shared_parameters * min(1.0, rows)


Ffn = DenseFfn | MoeFfn
