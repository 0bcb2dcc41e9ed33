"""The experts of one FFN instance, ready to compute."""

from collections.abc import Callable
from os import PathLike

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.topology import expert_ranges, ffn_number, shared_slice, width_slices
from ffn_worker.loader import DTYPES, LayerWeights, Progress, Shard, load_shard
from ffn_worker.moe import BACKENDS, Linear, choose_backend

_CPU = torch.device("cpu")
SharedExpert = Callable[[torch.Tensor], torch.Tensor]


def shard_of(model: MoeModel, instances: int, index: int, tp: int = 1, rank: int = 0) -> Shard:
    """Shard of rank `rank` of `tp` in FFN instance `index` of `instances`.

    The instances share the routed experts out, the ranks of one the width of each of these. The
    shared experts' width is shared out among all.

    Raises:
        ConfigError: more instances than routed experts, or a width that cannot be cut.
    """
    shared = None
    if model.shared_intermediate:
        number = ffn_number(index, rank, tp)
        shared = shared_slice(model.shared_intermediate, instances * tp, number)
    experts = expert_ranges(model.num_experts, instances)[index]
    return Shard(experts, width_slices(model.moe_intermediate, tp)[rank], shared)


class FfnModel:
    """MoE layers of one rank of an FFN instance; the outputs of all ranks of all instances add up
    to the full FFN output.

    Args:
        model: shape and serving dtype.
        shard: what this instance holds.
        layers: weights by global layer number; consumed (emptied), so that repacking them does
            not hold two copies of everything.
        backend: a name of `ffn_worker.moe.BACKENDS`, or "auto".
        device: where the weights are kept and the experts computed.

    Raises:
        ConfigError: the backend is unknown or cannot run here, or a layer is missing.
    """

    def __init__(
        self,
        model: MoeModel,
        shard: Shard,
        layers: dict[int, LayerWeights],
        *,
        backend: str = "auto",
        device: torch.device = _CPU,
    ) -> None:
        self.model = model
        self.device = device
        self.shard = shard
        self.dtype = DTYPES[model.dtype]
        self.weight_bytes = 0
        self.backend_name = choose_backend(
            backend, self.dtype, model.hidden, shard.width[1] - shard.width[0], device
        )
        self._backend = BACKENDS[self.backend_name](shard.experts, model.num_experts)
        self._shared: dict[int, SharedExpert] = {}
        for layer in model.moe_layers:
            if layer not in layers:
                raise ConfigError(f"no weights were loaded for layer {layer}")
            self._add(layer, layers.pop(layer))

    def _add(self, layer: int, weights: LayerWeights) -> None:
        tensors = (weights.w13, weights.w2, weights.shared_gate_up, weights.shared_down)
        self.weight_bytes += sum(t.nbytes for t in tensors if t is not None)
        there = self.device
        self._backend.prepare(layer, weights.w13.to(there), weights.w2.to(there))
        if weights.shared_gate_up is not None and weights.shared_down is not None:
            self._shared[layer] = _shared_expert(
                self._backend.linear(weights.shared_gate_up.to(there)),
                self._backend.linear(weights.shared_down.to(there)),
            )

    @property
    def capturable(self) -> bool:
        """Whether :meth:`forward` may be captured in a graph: no host wait, no data-dependent
        shape."""
        return self._backend.capturable

    def warm_up(self, rows: int) -> torch.Tensor:
        """One call of ``rows`` rows, so that its kernels are compiled and chosen; its output."""
        layer, kinds = self.model.moe_layers[0], self.model.top_k
        x = torch.zeros((rows, self.model.hidden), dtype=self.dtype, device=self.device)
        ids = torch.arange(rows * kinds, dtype=torch.int32, device=self.device)
        ids = (ids % self.model.num_experts).view(rows, kinds)
        return self.forward(layer, x, ids, torch.ones_like(ids, dtype=torch.float32))

    @torch.inference_mode()
    def forward(
        self, layer: int, x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        """This rank's part of the FFN output of one layer.

        routed_scaling * (sum of local routed experts) + local slice of the shared experts, in the
        order and dtype of vLLM 0.26 (moe_runner.py, `forward`). Summed over ranks and instances it
        is the full output, up to rounding.

        Args:
            layer: global layer number, one of `model.moe_layers`.
            x: [rows, hidden] in the serving dtype, contiguous, not modified.
            topk_ids: [rows, top_k] int32 global expert ids, negative where masked. Masks apply to
                routed experts only; the shared expert sees every row.
            topk_weights: [rows, top_k] float32.

        Returns:
            A new tensor [rows, hidden] in the serving dtype.
        """
        out = self._backend.forward(layer, x, topk_ids, topk_weights)
        if self.model.routed_scaling != 1.0:
            out *= self.model.routed_scaling
        if layer in self._shared:
            out += self._shared[layer](x)
        return out


def _shared_expert(gate_up: Linear, down: Linear) -> SharedExpert:
    """SiLU-gated MLP, every step in the serving dtype (vLLM 0.26 `DeepseekV2MLP`)."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, dim=-1)
        return down(F.silu(gate) * up)

    return forward


def load_ffn_model(
    path: str | PathLike[str],
    family: Family,
    model: MoeModel,
    *,
    instances: int,
    index: int,
    tp: int = 1,
    rank: int = 0,
    backend: str = "auto",
    device: torch.device = _CPU,
    threads: int = 4,
    progress: Progress | None = None,
) -> FfnModel:
    """Loads and prepares rank `rank` of `tp` in FFN instance `index` of `instances`.

    Raises:
        ConfigError: see the parts.
    """
    shard = shard_of(model, instances, index, tp, rank)
    width = shard.width[1] - shard.width[0]
    choose_backend(backend, DTYPES[model.dtype], model.hidden, width, device)
    loaded = load_shard(path, family, model, shard, threads=threads, progress=progress)
    return FfnModel(model, shard, loaded.layers, backend=backend, device=device)
