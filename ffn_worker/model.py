"""The experts of one FFN instance, ready to compute."""

from collections.abc import Callable
from os import PathLike

import torch
import torch.nn.functional as F

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.topology import expert_ranges, shared_slice
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.dummy import dummy_shard
from ffn_worker.loader import DTYPES, LayerWeights, Progress, Shard, load_shard, stored_scheme
from ffn_worker.moe import BACKENDS, Linear, Scheme, choose_backend
from ffn_worker.moe.quantise import Weight, in_scheme

_CPU = torch.device("cpu")
SharedExpert = Callable[[torch.Tensor], torch.Tensor]


def shard_of(model: MoeModel, instances: int, index: int) -> Shard:
    """Shard of FFN instance `index` of `instances`: whole routed experts, 1/instances of shared.

    Raises:
        ConfigError: more instances than routed experts.
    """
    shared = None
    if model.shared_intermediate:
        shared = shared_slice(model.shared_intermediate, instances, index)
    return Shard(expert_ranges(model.num_experts, instances)[index], shared)


class FfnModel:
    """MoE layers of one FFN instance; the outputs of all instances add up to the full FFN output.

    Args:
        model: shape and serving dtype.
        shard: what this instance holds.
        layers: weights by global layer number; consumed (emptied), so that repacking them does
            not hold two copies of everything.
        backend: a name of `ffn_worker.moe.BACKENDS`, or "auto".
        device: where the weights are kept and the experts computed.
        scheme: the format to keep the experts in; other weights are brought into it.
        join_shared: let a backend that can compute the shared expert with the routed ones do so.

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
        index: int = 0,
        device: torch.device = _CPU,
        scheme: Scheme = Scheme.PLAIN,
        join_shared: bool = True,
    ) -> None:
        self.model = model
        self.device = device
        self.shard = shard
        self.index = index
        self.dtype = DTYPES[model.dtype]
        self.scheme = scheme
        self._join_shared = join_shared
        self.weight_bytes = 0
        self.backend_name = choose_backend(
            backend, self.dtype, model.hidden, model.moe_intermediate, device, scheme
        )
        self._backend = BACKENDS[self.backend_name](shard.experts, model.num_experts)
        self._shared: dict[int, SharedExpert] = {}
        self._joined: set[int] = set()  # layers whose shared expert the backend computes
        for layer in model.moe_layers:
            if layer not in layers:
                raise ConfigError(f"no weights were loaded for layer {layer}")
            self._add(layer, layers.pop(layer))

    def _add(self, layer: int, weights: LayerWeights) -> None:
        w13, w2 = self._kept(weights.w13, self.scheme), self._kept(weights.w2, self.scheme)
        self.weight_bytes += w13.nbytes + w2.nbytes
        self._backend.prepare(layer, w13, w2)
        if weights.shared_gate_up is None or weights.shared_down is None:
            return
        shared = weights.shared_gate_up.to(self.device), weights.shared_down.to(self.device)
        self.weight_bytes += sum(weight.nbytes for weight in shared)
        if self._join_shared and self._backend.prepare_shared(layer, *shared):
            self._joined.add(layer)
        else:
            gate_up, down = (self._kept(weight, Scheme.PLAIN).codes for weight in shared)
            self._shared[layer] = _shared_expert(
                self._backend.linear(gate_up), self._backend.linear(down)
            )

    def _kept(self, weight: Weight, scheme: Scheme) -> Weight:
        return in_scheme(weight.to(self.device), scheme, self._backend.fp8, self.dtype)

    @property
    def capturable(self) -> bool:
        """Whether :meth:`forward` may be captured in a graph: no host wait, no data-dependent
        shape."""
        return self._backend.capturable

    @property
    def joins_shared(self) -> bool:
        """Whether the backend computes the shared expert of some layer with the routed ones."""
        return bool(self._joined)

    def warm_up(self, rows: int, tag: Tag) -> torch.Tensor:
        """One call of ``rows`` rows that come as ``tag``, so that its kernels are compiled and
        chosen; its output."""
        layer, kinds = self.model.moe_layers[0], self.model.top_k
        zeros = torch.zeros((rows, self.model.hidden), dtype=self.dtype, device=self.device)
        x = EncodedRows.of(zeros, tag)
        ids = torch.arange(rows * kinds, dtype=torch.int32, device=self.device)
        ids = (ids % self.model.num_experts).view(rows, kinds)
        return self.forward(layer, x, ids, torch.ones_like(ids, dtype=torch.float32))

    @torch.inference_mode()
    def forward(
        self,
        layer: int,
        x: EncodedRows | torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        """This instance's part of the FFN output of one layer.

        routed_scaling * (sum of local routed experts) + local slice of the shared experts, in the
        order and dtype of vLLM 0.26 (moe_runner.py, `forward`), but for a backend that computes the
        shared expert with the routed ones: that adds in float32 and rounds once. Summed over
        instances it is the full output, up to rounding.

        Args:
            layer: global layer number, one of `model.moe_layers`.
            x: [rows, hidden] as the wire brings them, or a tensor in the serving dtype;
                contiguous, not modified.
            topk_ids: [rows, top_k] int32 global expert ids, negative where masked. Masks apply to
                routed experts only; the shared expert sees every row.
            topk_weights: [rows, top_k] float32.

        Returns:
            A new tensor [rows, hidden] in the serving dtype.
        """
        rows = EncodedRows.of(x) if isinstance(x, torch.Tensor) else x
        if layer in self._shared and not self._backend.takes_encoded:
            rows = EncodedRows.of(rows.decode(self.dtype))  # once for both
        scaling = self.model.routed_scaling
        if layer in self._joined and scaling != 1.0:
            topk_weights, scaling = topk_weights * scaling, 1.0
        out = self._backend.forward_encoded(layer, rows, topk_ids, topk_weights, self.dtype)
        if scaling != 1.0:
            out *= scaling
        if layer in self._shared:
            out += self._shared[layer](rows.decode(self.dtype))
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
    backend: str = "auto",
    device: torch.device = _CPU,
    threads: int = 4,
    progress: Progress | None = None,
    weights: str = "auto",
    dummy: bool = False,
) -> FfnModel:
    """Loads and prepares FFN instance `index` of `instances`.

    Args:
        weights: the format to keep the experts in, a name of `Scheme`; "auto": as the checkpoint
            stores them. dummy: random weights instead of the checkpoint's.

    Raises:
        ConfigError: see the parts.
    """
    shard = shard_of(model, instances, index)
    if weights != "auto":
        scheme = Scheme(weights)
    else:
        scheme = Scheme.PLAIN if dummy else stored_scheme(path, family, model)
    # Before anything is read.
    dtype = DTYPES[model.dtype]
    choose_backend(backend, dtype, model.hidden, model.moe_intermediate, device, scheme)
    if dummy:
        layers = dummy_shard(model, shard, device)
    else:
        layers = load_shard(path, family, model, shard, threads=threads, progress=progress).layers
    return FfnModel(
        model, shard, layers, backend=backend, index=index, device=device, scheme=scheme
    )
