"""A MoE layer to measure: its weights, its input, and FfnModels of it on different backends."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from afd.models import MoeModel
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from afd_bench.moe.shapes import Cost, layer_cost
from ffn_worker.experts.build import build_ffn_model
from ffn_worker.experts.dummy import dummy_layers, whole_shard
from ffn_worker.experts.model import FfnModel
from ffn_worker.experts.shard import LayerWeights, Shard
from ffn_worker.moe.device import native_fp8
from ffn_worker.moe.quantise import in_scheme
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.tiles import LayerShape

CACHE_BYTES = 2**28
"""Bytes of weights of all layers. They exceed the caches, so that weights come from memory, as in a
model with many layers."""
BOUNDS = {Scheme.PLAIN: 2**-5, Scheme.FP8_BLOCK: 0.1, Scheme.MXFP4: 0.4}
"""Largest error of a row, relative to its largest value, against float32 on the same weights and
rows. It includes the rounding between both products to the rows' format."""


@dataclass(frozen=True)
class Problem:
    """A shape with weights on a device. layers: weights by layer number, in the shape's scheme."""

    shape: LayerShape
    model: MoeModel
    shard: Shard
    layers: dict[int, LayerWeights]
    device: torch.device

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.shape.scheme)

    def ffn(self, backend: str, *, join_shared: bool = True) -> FfnModel:
        """The layers on a backend. Models share the weights unless a backend repacks them."""
        return build_ffn_model(
            self.model,
            self.shard,
            self.layers.items(),
            backend=backend,
            device=self.device,
            scheme=self.scheme,
            join_shared=join_shared,
        )


@dataclass(frozen=True)
class Batch:
    """Rows in bfloat16 and in the wire's format for the scheme, and their experts."""

    plain: EncodedRows
    encoded: EncodedRows
    ids: torch.Tensor
    weights: torch.Tensor


@contextmanager
def problem(
    shape: LayerShape, device: torch.device, cache_bytes: int = CACHE_BYTES
) -> Iterator[Problem]:
    """Random weights of a shape; frees their memory afterwards."""
    nbytes = 2 * 3 * shape.hidden * shape.width * shape.experts
    count = max(1, -(-cache_bytes // nbytes))
    model = MoeModel(
        family="bench",
        architecture=shape.name,
        num_layers=count,
        moe_layers=tuple(range(count)),
        hidden=shape.hidden,
        moe_intermediate=shape.width,
        num_experts=shape.num_experts,
        top_k=shape.top_k,
        shared_intermediate=shape.shared,
        routed_scaling=1.0,
        dtype="bfloat16",
    )
    shard = whole_shard(model, shape.experts)
    torch.manual_seed(0)
    scheme, fp8 = Scheme(shape.scheme), native_fp8()
    layers = {}
    for layer, plain in dummy_layers(model, shard, device):
        w13, w2 = (in_scheme(w, scheme, fp8, torch.bfloat16) for w in (plain.w13, plain.w2))
        layers[layer] = LayerWeights(w13, w2, plain.shared_gate_up, plain.shared_down)
    try:
        yield Problem(shape, model, shard, layers, device)
    finally:
        layers.clear()
        gc.collect()
        if device.type != "cpu":
            torch.cuda.empty_cache()


def batch(shape: LayerShape, rows: int, device: torch.device) -> Batch:
    """Normally distributed rows. Experts of a row are drawn evenly from all experts."""
    generator, x, ids = _draw(shape, rows)
    x, ids = x.bfloat16().to(device), ids.int().to(device)
    weights = torch.rand(rows, shape.top_k, generator=generator).to(device)
    tags = {"fp8_block": native_fp8(), "mxfp4": Tag.E2M1}
    plain = EncodedRows.of(x)
    encoded = EncodedRows.of(x, tags[shape.scheme]) if shape.scheme in tags else plain
    return Batch(plain, encoded, ids, weights)


def pairs_and_used(shape: LayerShape, rows: int) -> tuple[int, int]:
    """Returns the (row, expert) pairs that :func:`batch` draws here, and the experts they use."""
    return _held(shape, _draw(shape, rows)[2])


def _draw(shape: LayerShape, rows: int) -> tuple[torch.Generator, torch.Tensor, torch.Tensor]:
    """Draws rows [rows, hidden] and their experts [rows, top_k] with the returned generator."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, shape.hidden, generator=generator)
    ids = torch.rand(rows, shape.num_experts, generator=generator).topk(shape.top_k).indices
    return generator, x, ids


def _held(shape: LayerShape, ids: torch.Tensor) -> tuple[int, int]:
    local = ids[ids < shape.experts]
    return local.numel(), local.unique().numel()


def cost_of(shape: LayerShape, given: Batch) -> Cost:
    """Bytes and FLOPs of one layer for a batch."""
    return layer_cost(shape, len(given.plain), *_held(shape, given.ids))


def error_against(want: torch.Tensor, got: torch.Tensor) -> float:
    """Largest error of a row relative to the row's largest value; rows of zeros must be zero."""
    worst = (got.float() - want).abs().amax(dim=1) / want.abs().amax(dim=1).clamp(min=1e-20)
    return float(worst.max())
