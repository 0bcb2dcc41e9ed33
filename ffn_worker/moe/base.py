"""The contract of a mixture-of-experts backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.load import SlotLoad
from ffn_worker.moe.quantise import Scheme, Weight

Linear = Callable[[torch.Tensor], torch.Tensor]


class MoeBackend(ABC):
    """Computes the routed experts [start, end) of every layer.

    Shapes: E_local = end - start, I = width of one expert, H = hidden size, K = experts per token.

    Args:
        experts: half-open range of global expert ids held by this FFN instance.
        num_experts: routed experts of the model; None: up to the end of the range.
    """

    capturable = False
    """Whether ``forward`` may be captured in a CUDA graph."""
    devices: tuple[str, ...] = ("cpu", "cuda")
    """Device types it runs on, as torch names them."""
    takes_encoded = False
    """Whether ``forward_encoded`` has a use for rows as the wire brings them."""
    schemes: tuple[Scheme, ...] = (Scheme.PLAIN,)
    """Weight formats that ``prepare`` takes."""
    fp8 = Tag.E4M3FN
    """The FP8 kind of its FP8_BLOCK weights."""

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        start, end = experts
        if not 0 <= start < end:
            raise ConfigError(f"expert range [{start}, {end}) is empty or negative")
        self.start = start
        self.end = end
        self.num_experts = end if num_experts is None else num_experts

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        """Why this backend cannot run here with these shapes, None when it can."""
        return None

    @abstractmethod
    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        """Takes over the weights of one layer; may repack them, so do not use them afterwards.

        Args:
            layer: global layer number.
            w13: [E_local, 2*I, H] of one of ``schemes`` (plain: in the serving dtype), I gate rows
                then I up rows per expert.
            w2: [E_local, H, I] of the same scheme.
        """

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        """Takes over the layer's shared expert, after ``prepare``, where it can be computed with
        the routed ones: then ``forward`` adds its output, with weight 1, to every row.

        Args:
            gate_up: [2*Is, H], gate rows then up rows. down: [H, Is]. Plain or FP8_BLOCK.

        Returns:
            False (and nothing is taken): the caller computes it apart.
        """
        return False

    @abstractmethod
    def release(self, layer: int) -> None:
        """Forgets the weights of one layer; nothing computes with them any more."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Sum over k of topk_weights[r, k] * expert(topk_ids[r, k])(x[r]), local experts only.

        expert(x) = (silu(x @ gate.T) * (x @ up.T)) @ down.T. Pairs whose id lies outside of
        [start, end) contribute nothing: other instances hold those experts, and a negative id
        masks the pair. A row without any local pair is zero.

        Args:
            x: [rows, H] in the serving dtype, contiguous; rows may be 0. Not modified.
            topk_ids: [rows, K] int32, global expert ids.
            topk_weights: [rows, K] float32.

        Returns:
            A new tensor [rows, H] in the serving dtype.
        """

    def forward_encoded(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dtype: torch.dtype,
        load: SlotLoad | None = None,
    ) -> torch.Tensor:
        """`forward` of rows as the wire brings them; the result is in ``dtype``, and the batch is
        added to ``load``.

        This is the one place where rows are decoded. A backend whose kernels multiply the wire's
        format overrides it. Rows whose pairs are all masked are not computed, so that it does not
        matter what their payload and scales hold.
        """
        if load is not None:
            load.add(topk_ids)
        return self.forward(layer, rows.decode(dtype), topk_ids, topk_weights)

    def linear(self, weight: torch.Tensor) -> Linear:
        """x [rows, in] -> x @ weight.T [rows, out], for weights [out, in] of shared experts.

        Backends override it to use the kernel that vLLM would use on the same machine.
        """
        return lambda x: F.linear(x, weight)
