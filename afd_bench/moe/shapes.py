"""The layers that `afd bench moe` measures, and the roofline of a layer. No torch."""

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
    # With its slice of the shared expert: an FFN step of the Step-3 report.
    "step-3-tp8ep2-step": LayerShape(7168, 640, 24, 48, 3, "plain", shared=320),
}
"""Shapes by name. TP shards have a slice of the width, EP shards some of the experts. Sizes are
from afd_planner/data/models. The benchmark sets ``scheme``."""
TINY = ("tiny", "tiny-step")
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TUNED_ROWS = (64, 128, 256, 512, 1024, 4096)
"""Row counts for which tiles are searched. Others use the next larger one, or the largest."""

_BITS = {"plain": 16, "fp8_block": 8, "mxfp4": 4}
_SCALE_BITS = {"plain": 0.0, "fp8_block": 32 / (128 * 128), "mxfp4": 8 / 32}
_ROW_SCALE_BITS = {"plain": 0.0, "fp8_block": 32 / 128, "mxfp4": 8 / 32}


def named(names: str) -> dict[str, LayerShape]:
    """Shapes by comma-separated names, "tiny", or "all" for those of real models.

    Raises:
        ConfigError: a name is unknown.
    """
    if names == "tiny":
        return {name: SHAPES[name] for name in TINY}
    if names == "all":
        return {name: shape for name, shape in SHAPES.items() if name not in TINY}
    wanted = names.split(",")
    unknown = [name for name in wanted if name not in SHAPES]
    if unknown:
        raise ConfigError(
            f"unknown shape {unknown[0]!r}; use all, tiny, or some of {', '.join(SHAPES)}"
        )
    return {name: SHAPES[name] for name in wanted}


def in_scheme(shape: LayerShape, scheme: str) -> LayerShape | None:
    """The shape with weights of a scheme; None if its sizes are not multiples of the blocks."""
    block = {"plain": 1, "fp8_block": 128, "mxfp4": 32}[scheme]
    if shape.width % block or shape.hidden % block:
        return None
    return replace(shape, scheme=scheme)


@dataclass(frozen=True)
class Ceilings:
    """What a machine reaches: bytes per second, read plus written, in a large copy, and FLOP/s in a
    large matrix product."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True)
class Cost:
    """Fewest bytes that a layer must move between memory and chip, and its FLOPs."""

    nbytes: float
    flops: float

    def seconds(self, ceilings: Ceilings) -> float:
        """The roofline: the shortest possible time."""
        return max(self.nbytes / ceilings.bytes_per_s, self.flops / ceilings.flops_per_s)

    def bound(self, ceilings: Ceilings) -> str:
        """What limits the time: "compute" or "memory"."""
        memory = self.nbytes / ceilings.bytes_per_s
        return "compute" if self.flops / ceilings.flops_per_s > memory else "memory"


def layer_cost(shape: LayerShape, rows: int, pairs: int, experts_hit: int) -> Cost:
    """Cost of one call.

    Counts one read of each selected expert, one read of the rows in the format that matches the
    weights, and one write of the results in 16 bits. Activations between the two products stay on
    the chip. A multiply-add is two FLOPs.

    Args:
        pairs: (row, expert) pairs of local experts. experts_hit: local experts with any pair.
    """
    weight_bits = _BITS[shape.scheme] + _SCALE_BITS[shape.scheme]
    per_expert = 3 * shape.hidden * weight_bits / 8
    row_bits = _BITS[shape.scheme] + _ROW_SCALE_BITS[shape.scheme] + 16
    nbytes = per_expert * (experts_hit * shape.width + shape.shared)
    nbytes += rows * shape.hidden * row_bits / 8
    flops = 6 * shape.hidden * (pairs * shape.width + rows * shape.shared)
    return Cost(nbytes, flops)
