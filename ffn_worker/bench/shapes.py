"""The layers that `afd bench moe` measures, and the least time that one can take. No torch."""

from dataclasses import dataclass, replace

from afd.errors import ConfigError
from ffn_worker.moe.tiles import LayerShape

SHAPES = {
    "tiny": LayerShape(256, 128, 8, 8, 2, "plain"),
    "tiny-step": LayerShape(256, 128, 4, 8, 2, "plain", shared=128),
    "qwen3-30b-a3b": LayerShape(2048, 768, 128, 128, 8, "plain"),
    "qwen3-30b-a3b-ep4": LayerShape(2048, 768, 32, 128, 8, "plain"),
    "qwen3-30b-a3b-tp2": LayerShape(2048, 384, 128, 128, 8, "plain"),
    "qwen3-235b-a22b-ep8": LayerShape(4096, 1536, 16, 128, 8, "plain"),
    "qwen3-235b-a22b-tp4": LayerShape(4096, 384, 128, 128, 8, "plain"),
    "deepseek-v3-ep8": LayerShape(7168, 2048, 32, 256, 8, "plain"),
    "deepseek-v3-tp8": LayerShape(7168, 256, 256, 256, 8, "plain"),
    "step-3-ep8": LayerShape(7168, 5120, 6, 48, 3, "plain"),
    "step-3-tp8ep2": LayerShape(7168, 640, 24, 48, 3, "plain"),
    # The same with its part of the shared expert: an FFN step of the Step-3 report.
    "step-3-tp8ep2-step": LayerShape(7168, 640, 24, 48, 3, "plain", shared=320),
}
"""By name; TP shards have a part of the width, EP shards a part of the experts. Sizes are those of
configs/models. ``scheme`` is filled in by the benchmark."""
TINY = ("tiny", "tiny-step")
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TUNED_ROWS = (64, 128, 256, 512, 1024, 4096)
"""Row counts that tiles are searched for; others take the next, a larger batch the last."""

_BITS = {"plain": 16, "fp8_block": 8, "mxfp4": 4}
_SCALE_BITS = {"plain": 0.0, "fp8_block": 32 / (128 * 128), "mxfp4": 8 / 32}
_ROW_SCALE_BITS = {"plain": 0.0, "fp8_block": 32 / 128, "mxfp4": 8 / 32}


def named(names: str) -> dict[str, LayerShape]:
    """Shapes of a comma-separated list; "tiny", and "all" for the real models'.

    Raises:
        ConfigError: a name is not known.
    """
    if names == "tiny":
        return {name: SHAPES[name] for name in TINY}
    if names == "all":
        return {name: shape for name, shape in SHAPES.items() if name not in TINY}
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in SHAPES]
    if unknown:
        raise ConfigError(f"unknown shape {unknown[0]!r}; use all, tiny, or of {', '.join(SHAPES)}")
    return {name: SHAPES[name] for name in wanted}


def in_scheme(shape: LayerShape, scheme: str) -> LayerShape | None:
    """The shape with weights of a scheme; None where its blocks do not divide the sizes."""
    block = {"plain": 1, "fp8_block": 128, "mxfp4": 32}[scheme]
    if shape.width % block or shape.hidden % block:
        return None
    return replace(shape, scheme=scheme)


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches in a large copy (bytes read and written per second) and in a large
    matrix product (FLOP/s)."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """Least bytes that a layer must move between memory and chip, and its FLOPs."""

    nbytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        return max(self.nbytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)

    def bound(self, ceilings: Ceilings) -> str:
        memory = self.nbytes / ceilings.bytes_per_s
        return "compute" if self.flops / ceilings.flops_per_s > memory else "memory"


def layer_cost(shape: LayerShape, rows: int, pairs: int, experts_hit: int) -> Cost:
    """Cost of one call.

    Every expert that a pair chose is read once, rows once in the format that goes with the weights,
    and results are written once in 16 bits; what passes between the two products stays on the chip.
    A multiply-add is two FLOPs.

    Args:
        pairs: (row, expert) pairs of local experts. experts_hit: local experts with any.
    """
    weight_bits = _BITS[shape.scheme] + _SCALE_BITS[shape.scheme]
    per_expert = 3 * shape.hidden * weight_bits / 8
    row_bits = _BITS[shape.scheme] + _ROW_SCALE_BITS[shape.scheme] + 16
    nbytes = per_expert * (experts_hit * shape.width + shape.shared)
    nbytes += rows * shape.hidden * row_bits / 8
    flops = 6 * shape.hidden * (pairs * shape.width + rows * shape.shared)
    return Cost(nbytes, flops)
