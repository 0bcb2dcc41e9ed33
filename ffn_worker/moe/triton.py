"""Backend on this project's grouped Triton kernels, for CUDA and ROCm."""

import importlib.util
from dataclasses import dataclass

import torch

from afd.errors import ConfigError
from afd.wire.codecs import FP8_MAX
from afd.wire.codecs_torch import DTYPE_OF_TAG
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.quantise import Weight, quantise_weight
from ffn_worker.moe.sorting import SortedPairs, sort_pairs


@dataclass(frozen=True)
class Tile:
    """How one launch is cut: rows, columns and depth of a tile, and the programs' schedule."""

    m: int
    n: int
    k: int
    group_m: int
    warps: int
    stages: int


def tile_for(pairs_per_expert: float, depth: int, quantised: bool, hip: bool) -> Tile:
    """A tile that runs everywhere; tuned ones are data, not code.

    Args:
        pairs_per_expert: mean over the local experts.
        depth: K of the product, a multiple of 32.
        quantised: whether the weights are FP8 or MXFP4.
        hip: 64 KiB of LDS on gfx942 hold fewer stages. On Hopper, FP8 is multiplied in tiles of 64
            rows only: with fewer, Triton converts to float16 (seen in its PTX).
    """
    smallest = 64 if quantised and not hip else 16
    m = next((size for size in (16, 32) if max(pairs_per_expert, smallest) <= size), 64)
    widest = 128 if quantised else 64
    k = next(size for size in (128, 64, 32) if size <= widest and depth % size == 0)
    return Tile(m, 128, k, 8, 4 if m <= 32 else 8, 2 if hip else 3)


class TritonBackend(MoeBackend):
    """Experts [start, end); weights as they are, in FP8 by blocks, or in MXFP4.

    FP8 weights take FP8 rows (others are quantised first). MXFP4 weights take MXFP4 rows, or
    bfloat16 rows as they are.

    Args:
        tag: format of the weights, which are quantised on ``prepare``; None: the serving dtype.
    """

    devices = ("cuda",)

    def __init__(
        self, experts: tuple[int, int], num_experts: int | None = None, *, tag: Tag | None = None
    ) -> None:
        super().__init__(experts, num_experts)
        self._tag = tag
        self._layers: dict[int, tuple[Weight, Weight]] = {}

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return "the package triton is not installed"
        if not torch.cuda.is_available():
            return "there is no GPU"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it computes in bfloat16 or float16, not {dtype}"
        if hidden % 32 or intermediate % 32:
            return f"sizes must be multiples of 32, not {hidden} and {intermediate}"
        return None

    def prepare(self, layer: int, w13: torch.Tensor, w2: torch.Tensor) -> None:
        plain = {torch.bfloat16: Tag.BFLOAT16, torch.float16: Tag.FLOAT16}
        tag = plain[w13.dtype] if self._tag is None else self._tag
        if tag in FP8_MAX and w2.shape[2] % SCALE_BLOCK:
            raise ConfigError(
                f"FP8 experts need an intermediate size divisible by {SCALE_BLOCK}, not "
                f"{w2.shape[2]}; use bfloat16"
            )
        self._layers[layer] = quantise_weight(w13, tag), quantise_weight(w2, tag)

    def release(self, layer: int) -> None:
        del self._layers[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        tag = self._layers[layer][0].tag
        if tag in FP8_MAX:
            from afd.wire.codecs_gpu_torch import quantise_fp8

            codes, scales = quantise_fp8(x, tag)
            return self.run(layer, codes, topk_ids, topk_weights, scales=scales, dtype=x.dtype)
        return self.run(layer, x, topk_ids, topk_weights, dtype=x.dtype)

    def run(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        scales: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """`forward`, also for rows as the wire brings them.

        Args:
            x: [rows, H] in the serving dtype; with ``scales``: FP8 and float32 [rows, H/128], or
                uint8 [rows, H/2] of e2m1 pairs and E8M0 uint8 [rows, H/32].
            dtype: of the result.

        Raises:
            ConfigError: rows in a format that these weights cannot take.
        """
        from ffn_worker.kernels.moe import combine_kernel

        w13, w2 = self._layers[layer]
        rows, top_k = topk_ids.shape
        hidden, width = w2.codes.shape[1], w13.codes.shape[1] // 2
        out = torch.empty((rows, hidden), dtype=dtype, device=x.device)
        if rows == 0:
            return out
        kind = _row_kind(x, scales, w13.tag)
        pairs, hip = rows * top_k, torch.version.hip is not None
        load = pairs / (self.end - self.start)
        first = tile_for(load, hidden, w13.scales is not None, hip)
        second = tile_for(load, width, w13.scales is not None, hip)
        order = sort_pairs(topk_ids, self.start, self.end, first.m)
        act, act_scales = _activation(kind, w13.tag, pairs, width, dtype, x.device)
        y = torch.empty((pairs, hidden), dtype=dtype, device=x.device)
        _launch(x, scales, kind, w13, act, act_scales, kind, order, pairs, top_k, True, first)
        _launch(act, act_scales, kind, w2, y, None, "plain", order, pairs, 1, False, second)
        block = 1024
        combine_kernel[(rows, -(-hidden // block))](
            y, topk_ids, topk_weights, out, hidden, self.start, self.end, top_k, block
        )
        return out


def _kind(tag: Tag) -> str:
    return "fp8" if tag in FP8_MAX else "mxfp4" if tag == Tag.E2M1 else "plain"


def _row_kind(x: torch.Tensor, scales: torch.Tensor | None, weights: Tag) -> str:
    """Format of the rows, checked against that of the weights."""
    if scales is None:
        kind, fits = "plain", weights not in FP8_MAX
    elif scales.dtype == torch.float32:
        kind, fits = "fp8", weights in FP8_MAX and x.dtype == DTYPE_OF_TAG[weights]
    else:
        kind, fits = "mxfp4", weights == Tag.E2M1
    if not fits:
        raise ConfigError(f"{weights.name} experts cannot take rows of {x.dtype}")
    return kind


def _activation(
    kind: str, tag: Tag, pairs: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory between the two products, in the format of the rows."""
    if kind == "plain":
        return torch.empty((pairs, width), dtype=dtype, device=device), None
    if kind == "fp8":
        codes = torch.empty((pairs, width), dtype=DTYPE_OF_TAG[tag], device=device)
        return codes, torch.empty((pairs, width // SCALE_BLOCK), dtype=torch.float32, device=device)
    codes = torch.empty((pairs, width // 2), dtype=torch.uint8, device=device)
    return codes, torch.empty((pairs, width // MX_BLOCK), dtype=torch.uint8, device=device)


def _launch(
    a: torch.Tensor,
    a_scales: torch.Tensor | None,
    kind_a: str,
    weight: Weight,
    c: torch.Tensor,
    c_scales: torch.Tensor | None,
    kind_c: str,
    order: SortedPairs,
    pairs: int,
    rows_per: int,
    gated: bool,
    tile: Tile,
) -> None:
    from ffn_worker.kernels.moe import grouped_gemm_kernel

    kind_b = _kind(weight.tag)
    n = weight.codes.shape[1] // (2 if gated else 1)
    k = weight.codes.shape[2] * (2 if kind_b == "mxfp4" else 1)
    blocks = order.experts.numel() * -(-n // tile.n)
    grouped_gemm_kernel[(blocks,)](
        a,
        a if a_scales is None else a_scales,
        weight.codes,
        weight.codes if weight.scales is None else weight.scales,
        c,
        c if c_scales is None else c_scales,
        order.pairs,
        order.experts,
        order.used,
        n,
        k,
        pairs,
        rows_per,
        A=kind_a,
        B=kind_b,
        C=kind_c,
        GATED=gated,
        FP8_MAX=FP8_MAX.get(weight.tag, 0.0),
        BM=tile.m,
        BN=tile.n,
        BK=tile.k,
        GROUP_M=tile.group_m,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
