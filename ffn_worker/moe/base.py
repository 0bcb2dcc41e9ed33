"""The interface of a MoE backend."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe.activation import ExpertMath
from ffn_worker.moe.load_counts import SlotLoad
from ffn_worker.moe.quantise import Weight

Linear = Callable[[torch.Tensor], torch.Tensor]


class MoeBackend(ABC):
    """Computes the routed experts [start, end) of every layer.

    Shapes: E_local = end - start, I = width of one expert, H = hidden size, K = experts per token.

    Args:
        experts: half-open range of global expert ids held by this FFN instance.
        num_experts: routed experts of the model; None: the end of the range.
    """

    capturable = False
    """Whether ``forward`` may be captured in a CUDA graph."""
    takes_encoded = False
    """Whether ``forward_encoded`` can multiply rows in the wire's format, without decoding them."""
    fp8 = Tag.E4M3FN
    """FP8 type of its FP8_BLOCK weights."""

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        start, end = experts
        if not 0 <= start < end:
            raise ConfigError(f"expert range [{start}, {end}) is empty or negative")
        self.start = start
        self.end = end
        self.num_experts = end if num_experts is None else num_experts

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        """Why this backend cannot run here with these shapes, None if it can."""
        return None

    @abstractmethod
    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        """Takes over the weights of one layer. Do not use them afterwards: they may be repacked.

        Args:
            layer: global layer number.
            w13: [E_local, 2*I, H], I gate rows then I up rows per expert, in one of the schemes
                that the registry lists for this backend (plain: in the serving dtype).
            w2: [E_local, H, I] in the same scheme.
        """

    def prepare_math(self, layer: int, math: ExpertMath) -> None:
        """Sets a layer's activation and biases, before ``prepare``. Default: silu, no biases.

        Only backends whose registry entry says so take another; the caller checks that.
        """
        assert math.is_default, f"{type(self).__name__} computes silu without biases only"

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        """Takes over the layer's shared expert, if it can be computed with the routed ones.

        Call it after ``prepare``. If it returns True, ``forward`` adds the shared expert's output,
        with weight 1, to every row.

        Args:
            gate_up: [2*Is, H], gate rows then up rows. down: [H, Is]. Plain or FP8_BLOCK.

        Returns:
            Whether the shared expert was taken over. If not, the caller computes it separately.
        """
        return False

    @abstractmethod
    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Returns all tensors that hold the layer's routed experts. The first dimension of each
        goes through the experts; a shared expert may follow them."""

    def take(self, layer: int, other: "MoeBackend") -> None:
        """Copies the layer's routed experts of another backend of the same class over those held
        here. Their addresses stay, so graphs that were captured compute the new experts."""
        for mine, theirs in zip(self.tensors(layer), other.tensors(layer), strict=True):
            _raw(mine[: len(theirs)]).copy_(_raw(theirs))

    @abstractmethod
    def release(self, layer: int) -> None:
        """Frees the weights of one layer. No call may be using them."""

    @abstractmethod
    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Returns the sum over k of topk_weights[r, k] * expert(topk_ids[r, k])(x[r]).

        expert(x) = (silu(x @ gate.T) * (x @ up.T)) @ down.T, unless ``prepare_math`` set another
        activation and biases. Only local experts are computed: ids
        outside of [start, end) belong to other instances, and a negative id masks the pair. A row
        without a local pair is zero.

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
        """As `forward`, but takes rows in the wire's format.

        This is the only place where rows are decoded. A backend whose kernels multiply the wire's
        format overrides it. Rows whose pairs are all masked are not computed; their payload and
        scales may hold anything.

        Args:
            dtype: of the result. load: counts the pairs of this batch; None: nothing counts.
        """
        if load is not None:
            load.add(topk_ids)
        return self.forward(layer, rows.decode(dtype), topk_ids, topk_weights)

    def linear(self, weight: torch.Tensor) -> Linear:
        """Returns the function x [rows, in] -> x @ weight.T [rows, out], for shared experts.

        weight: [out, in]. Backends override it to use vLLM's kernel on the same machine.
        """
        return lambda x: F.linear(x, weight)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes if a value is one: not every device copies every small dtype."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
