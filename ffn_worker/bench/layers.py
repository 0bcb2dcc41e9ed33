"""One layer, its input, and who computes it: FfnModels on different backends, same weights."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from afd.models import MoeModel
from afd.wire.layout import Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.bench.shapes import Cost, layer_cost
from ffn_worker.dummy import dummy_shard, whole_shard
from ffn_worker.loader import LayerWeights, Shard
from ffn_worker.model import FfnModel
from ffn_worker.moe import Scheme
from ffn_worker.moe.device import native_fp8
from ffn_worker.moe.quantise import in_scheme
from ffn_worker.moe.tiles import LayerShape

CACHE_BYTES = 2**28
"""Layers take turns until they hold this much, so that weights come from memory as in a model."""
BOUNDS = {Scheme.PLAIN: 2**-5, Scheme.FP8_BLOCK: 0.1, Scheme.MXFP4: 0.4}
"""Largest error of a row, relative to its largest value, against float32 on the same weights and
rows: roundings of the product of gate and up to the rows' format included."""


@dataclass(frozen=True)
class Problem:
    """A shape with weights, on a device. layers: by number, already in the shape's scheme."""

    shape: LayerShape
    model: MoeModel
    shard: Shard
    layers: dict[int, LayerWeights]
    device: torch.device

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.shape.scheme)

    def ffn(self, backend: str, *, join_shared: bool = True) -> FfnModel:
        """The layers on a backend; they share the weights where it does not repack them."""
        return FfnModel(
            self.model,
            self.shard,
            dict(self.layers),
            backend=backend,
            device=self.device,
            scheme=self.scheme,
            join_shared=join_shared,
        )


@dataclass(frozen=True)
class Batch:
    """Rows as bfloat16 and as the wire would bring them to weights of the scheme; their experts."""

    plain: EncodedRows
    encoded: EncodedRows
    ids: torch.Tensor
    weights: torch.Tensor


@contextmanager
def problem(
    shape: LayerShape, device: torch.device, cache_bytes: int = CACHE_BYTES
) -> Iterator[Problem]:
    """Random weights of a shape; their memory is free again afterwards."""
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
    for layer, plain in dummy_shard(model, shard, device).items():
        routed = (in_scheme(w, scheme, fp8, torch.bfloat16) for w in (plain.w13, plain.w2))
        layers[layer] = LayerWeights(*routed, plain.shared_gate_up, plain.shared_down)
    try:
        yield Problem(shape, model, shard, layers, device)
    finally:
        layers.clear()
        gc.collect()
        if device.type != "cpu":
            torch.cuda.empty_cache()


def batch(shape: LayerShape, rows: int, device: torch.device) -> Batch:
    """Normal rows; every row's experts are drawn evenly from all of the model's."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, shape.hidden, generator=generator).bfloat16().to(device)
    chances = torch.rand(rows, shape.num_experts, generator=generator)
    ids = chances.topk(shape.top_k).indices.int().to(device)
    weights = torch.rand(rows, shape.top_k, generator=generator).to(device)
    tags = {"fp8_block": native_fp8(), "mxfp4": Tag.E2M1}
    plain = EncodedRows.of(x)
    encoded = EncodedRows.of(x, tags[shape.scheme]) if shape.scheme in tags else plain
    return Batch(plain, encoded, ids, weights)


def cost_of(shape: LayerShape, given: Batch) -> Cost:
    local = given.ids[given.ids < shape.experts]
    return layer_cost(shape, len(given.plain), local.numel(), local.unique().numel())


def error_against(want: torch.Tensor, got: torch.Tensor) -> float:
    """Largest error of a row relative to the row's largest value; rows of zeros must be zero."""
    worst = (got.float() - want).abs().amax(dim=1) / want.abs().amax(dim=1).clamp(min=1e-20)
    return float(worst.max())
