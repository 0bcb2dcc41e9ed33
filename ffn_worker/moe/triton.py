"""Backend on this project's grouped Triton kernels, for CUDA and ROCm."""

import importlib.util
from dataclasses import dataclass, replace
from functools import partial

import torch

from afd.wire.codecs import FP8_MAX
from afd.wire.dtypes_torch import DTYPE_OF_TAG
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag
from afd.wire.rows_torch import EncodedRows
from ffn_worker.moe.base import MoeBackend
from ffn_worker.moe.device import native_fp8
from ffn_worker.moe.load_counts import SlotLoad
from ffn_worker.moe.quantise import Weight, in_scheme, widened, with_expert
from ffn_worker.moe.sorting import SortedPairs, sort_pairs_on_gpu
from ffn_worker.moe.tiles import LayerShape, Tile, Tilings, tuned_tilings


@dataclass(frozen=True)
class Layer:
    """Weights of one layer: the routed experts, followed by the shared one, if any.

    shape: the key for tilings, except that top_k comes with the rows.
    """

    w13: Weight
    w2: Weight
    shape: LayerShape


@dataclass(frozen=True)
class Products:
    """Both launches of a layer for one batch.

    act, y: outputs of the first and of the second launch, by pairs. m: pairs per block. each: pairs
    per row.
    """

    layer: Layer
    rows: EncodedRows
    act: EncodedRows
    y: EncodedRows
    order: SortedPairs
    m: int
    each: int

    def gate_up(self, tile: Tile, *, compile_only: bool = False) -> None:
        _launch(self, self.rows, self.layer.w13, self.act, tile, self.each, True, compile_only)

    def down(self, tile: Tile, *, compile_only: bool = False) -> None:
        _launch(self, self.act, self.layer.w2, self.y, tile, 1, False, compile_only)


class TritonBackend(MoeBackend):
    """Experts [start, end) with plain, FP8_BLOCK or MXFP4 weights.

    FP8 weights multiply rows of the same FP8 type, MXFP4 weights multiply MXFP4 or bfloat16 rows.
    Other rows are decoded first, and quantised again for FP8 weights. A shared expert that is not
    wider than a routed one is computed in the same launches.

    Args:
        tilings: tile sizes of the launches; None: from the tuning files of this device.
    """

    capturable = True
    takes_encoded = True

    def __init__(
        self,
        experts: tuple[int, int],
        num_experts: int | None = None,
        *,
        tilings: Tilings | None = None,
    ) -> None:
        super().__init__(experts, num_experts)
        self.fp8 = native_fp8()
        self._tilings = tilings
        self._layers: dict[int, Layer] = {}

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

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        hidden, width = w2.shape[1:]
        held = self.end - self.start
        shape = LayerShape(hidden, width, held, self.num_experts, 0, w13.scheme.value)
        self._layers[layer] = Layer(w13, w2, shape)
        if self._tilings is None:
            name = torch.cuda.get_device_name(w13.codes.device)
            self._tilings = tuned_tilings(name, torch.version.hip is not None)

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        held = self._layers[layer]
        width = held.shape.width
        # Rounded up to whole blocks, so that scales cover all columns that are read.
        computed = -(-down.shape[-1] // SCALE_BLOCK) * SCALE_BLOCK
        if computed > width:
            return False
        dtype = DTYPE_OF_TAG[held.w2.tag] if held.w2.scales is None else torch.bfloat16
        scheme = held.w2.scheme
        gate_up, down = (
            in_scheme(weight, scheme, self.fp8, dtype) for weight in widened(gate_up, down, width)
        )
        self._layers[layer] = Layer(
            with_expert(held.w13, gate_up),
            with_expert(held.w2, down),
            replace(held.shape, shared=computed),
        )
        return True

    def tensors(self, layer: int) -> tuple[torch.Tensor, ...]:
        held = self._layers[layer]
        return (*held.w13.tensors, *held.w2.tensors)

    def release(self, layer: int) -> None:
        del self._layers[layer]

    def forward(
        self,
        layer: int,
        x: torch.Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> torch.Tensor:
        return self.forward_encoded(layer, EncodedRows.of(x), topk_ids, topk_weights, x.dtype)

    def forward_encoded(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dtype: torch.dtype,
        load: SlotLoad | None = None,
    ) -> torch.Tensor:
        held = self._layers[layer]
        out = torch.empty((len(rows), held.shape.hidden), dtype=dtype, device=rows.device)
        if len(rows):
            rows = accepted(rows, held.w13.tag, dtype)
            self._compute(layer, rows, topk_ids, topk_weights, out, load)
        return out

    def _compute(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        load: SlotLoad | None,
    ) -> None:
        """Fills ``out`` [rows, hidden]. rows: see :func:`accepted`."""
        from ffn_worker.kernels.moe import combine_kernel

        assert self._tilings is not None  # set by prepare
        shape = self._layers[layer].shape
        count, top_k = topk_ids.shape
        tiling = self._tilings(replace(shape, top_k=top_k), count)
        products = self.products(layer, rows, topk_ids, tiling.m, out.dtype, load)
        products.gate_up(tiling.gate_up)
        products.down(tiling.down)
        block = 1024
        combine_kernel[(count, -(-shape.hidden // block))](
            products.y.payload,
            topk_ids,
            topk_weights,
            out,
            shape.hidden,
            self.start,
            self.end,
            TOP_K=top_k,
            SHARED=bool(shape.shared),
            BLOCK=block,
        )

    def products(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        m: int,
        dtype: torch.dtype,
        load: SlotLoad | None = None,
    ) -> "Products":
        """Prepares both launches of a layer: sorts pairs in blocks of ``m`` and allocates results.

        rows: in a format that the kernels can multiply with the weights.
        """
        held = self._layers[layer]
        shared, (count, top_k) = bool(held.shape.shared), topk_ids.shape
        counts = None if load is None else load.counts
        order = sort_pairs_on_gpu(topk_ids, self.start, self.end, m, shared=shared, load=counts)
        pairs = count * (top_k + shared)
        act = _activation(rows.tag, pairs, held.shape.width, dtype, rows.device)
        y = torch.empty((pairs, held.shape.hidden), dtype=dtype, device=rows.device)
        return Products(held, rows, act, EncodedRows.of(y), order, m, top_k + shared)


def _kind(tag: Tag) -> str:
    return "fp8" if tag in FP8_MAX else "mxfp4" if tag == Tag.E2M1 else "plain"


def accepted(rows: EncodedRows, weights: Tag, dtype: torch.dtype) -> EncodedRows:
    """Converts rows, if necessary, to a format that kernels can multiply with ``weights``."""
    if weights == Tag.E2M1:
        if rows.tag in (Tag.E2M1, Tag.BFLOAT16):
            return rows
        return EncodedRows.of(rows.decode(torch.bfloat16))
    if weights not in FP8_MAX:
        return EncodedRows.of(rows.decode(DTYPE_OF_TAG[weights]))
    if rows.tag == weights:
        return rows
    return EncodedRows.of(rows.decode(dtype), weights)


def _activation(
    tag: Tag, pairs: int, width: int, dtype: torch.dtype, device: torch.device
) -> EncodedRows:
    """Allocates the memory between the two products, in the format of the rows."""
    if tag in FP8_MAX:
        codes = torch.empty((pairs, width), dtype=DTYPE_OF_TAG[tag], device=device)
        scales = torch.empty((pairs, width // SCALE_BLOCK), dtype=torch.float32, device=device)
        return EncodedRows(tag, codes, scales)
    if tag == Tag.E2M1:
        codes = torch.empty((pairs, width // 2), dtype=torch.uint8, device=device)
        scales = torch.empty((pairs, width // MX_BLOCK), dtype=torch.uint8, device=device)
        return EncodedRows(tag, codes, scales)
    return EncodedRows(tag, torch.empty((pairs, width), dtype=DTYPE_OF_TAG[tag], device=device))


def _launch(
    products: Products,
    a: EncodedRows,
    weight: Weight,
    c: EncodedRows,
    tile: Tile,
    rows_per: int,
    gated: bool,
    compile_only: bool,
) -> None:
    from ffn_worker.kernels.moe import grouped_gemm_kernel

    order, shared = products.order, products.layer.shape.shared
    experts, n, k = weight.shape
    n //= 2 if gated else 1
    grid = (order.experts.numel() * -(-n // tile.n),)
    launch = grouped_gemm_kernel[grid]
    if compile_only:
        launch = partial(grouped_gemm_kernel.warmup, grid=grid)
    launch(
        a.payload,
        a.payload if a.scales is None else a.scales,
        weight.codes,
        weight.codes if weight.scales is None else weight.scales,
        c.payload,
        c.payload if c.scales is None else c.scales,
        order.pairs,
        order.experts,
        order.used,
        n,
        k,
        len(c),
        rows_per,
        experts - 1,
        shared,
        A=_kind(a.tag),
        B=_kind(weight.tag),
        C=_kind(c.tag),
        GATED=gated,
        SHARED=bool(shared),
        FP8_MAX=FP8_MAX.get(weight.tag, 0.0),
        BM=products.m,
        BN=tile.n,
        BK=tile.k,
        GROUP_M=tile.group_m,
        SWAP=tile.swap,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
