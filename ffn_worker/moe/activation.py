"""What an expert computes beside its two products: the activation and the biases."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_LIMIT, _ALPHA = 7.0, 1.702
"""Of swiglu_oai (vLLM 0.26, layers/activation.py ``SwigluOAIAndMul``; gpt-oss's config.json)."""


@dataclass(frozen=True)
class ExpertMath:
    """Of all experts of a layer.

    activation: an element of ``afd.models.family.ACTIVATIONS``. w13_bias [E_local, 2*I], gate
    before up, and w2_bias [E_local, H], in the serving dtype; None: there are none.
    """

    activation: str = "silu"
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The biases, if there are any."""
        return tuple(bias for bias in (self.w13_bias, self.w2_bias) if bias is not None)

    @property
    def is_default(self) -> bool:
        return self.activation == "silu" and self.w13_bias is None

    def first(self, product: torch.Tensor, expert: int) -> torch.Tensor:
        """Returns the activation [rows, I] of x @ w13.T [rows, 2*I], in the product's dtype."""
        if self.w13_bias is not None:
            product = product + self.w13_bias[expert].to(product.dtype)
        gate, up = product.chunk(2, dim=-1)
        if self.activation == "silu":
            return F.silu(gate) * up
        gate, up = gate.clamp(max=_LIMIT), up.clamp(-_LIMIT, _LIMIT)
        return gate * torch.sigmoid(_ALPHA * gate) * (up + 1)

    def second(self, product: torch.Tensor, expert: int) -> torch.Tensor:
        """Returns the expert's output of the product with w2, [rows, H]."""
        if self.w2_bias is None:
            return product
        return product + self.w2_bias[expert].to(product.dtype)


SILU = ExpertMath()
