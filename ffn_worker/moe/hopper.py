"""Backend for NVIDIA Hopper that uses, for each batch, the fastest of four backends."""

from dataclasses import replace

import torch

from afd.wire.rows_torch import EncodedRows
from ffn_worker.kernels import grouped
from ffn_worker.moe.batch_selection import SelectionByMode, selection_of
from ffn_worker.moe.deep_gemm import DeepGemmBackend, Operand, SlotLayout
from ffn_worker.moe.device import launch_mode
from ffn_worker.moe.grouped import GroupedBackend, cannot_compile
from ffn_worker.moe.load_counts import SlotLoad
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.sorting import PlacedPairs
from ffn_worker.moe.tiles import LayerShape
from ffn_worker.moe.triton import Layer, TritonBackend
from ffn_worker.moe.vllm_cuda import VllmCudaBackend


class HopperBackend(GroupedBackend):
    """Selects among ``triton``, ``deep_gemm``, ``grouped`` and ``vllm_cuda``, which take the same
    weights, by the device's tuning file (:mod:`ffn_worker.moe.batch_selection`). Captured and eager
    calls are selected separately.

    A shared expert is computed with the routed ones by all but ``vllm_cuda``, which cannot and is
    then not selected.
    """

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._selection: SelectionByMode | None = None
        self._vllm: VllmCudaBackend | None = None
        self._compiles = cannot_compile() is None
        self._names: dict[tuple[LayerShape, int, int, str], str] = {}  # cache of _looked_up

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        return DeepGemmBackend.unavailable(dtype, hidden, intermediate)

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        DeepGemmBackend.prepare(
            self, layer, w13, w2
        )  # GroupedBackend refuses many experts; here another backend computes them
        if self._selection is None:
            self._selection = selection_of(torch.cuda.get_device_name(w13.codes.device))
            if "vllm_cuda" in self._selection.names(w13.scheme.value):
                self._vllm = VllmCudaBackend((self.start, self.end), self.num_experts)
        if self._vllm is not None:
            self._vllm.prepare(layer, w13, w2)

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        joined = TritonBackend.prepare_shared(self, layer, gate_up, down)
        if joined and self._vllm is not None:
            self._vllm.release(layer)  # these weights lack the shared expert
        return joined and super().prepare_shared(layer, gate_up, down)

    def release(self, layer: int) -> None:
        if self._vllm is not None and not self._layers[layer].shape.shared:
            self._vllm.release(layer)
        super().release(layer)

    def chosen(self, layer: int, rows: int, top_k: int) -> str:
        """Name of the backend that computes a batch of ``rows`` rows."""
        return self._chosen(self._layers[layer].shape, rows, top_k)

    def _chosen(self, shape: LayerShape, rows: int, top_k: int) -> str:
        mode = launch_mode()
        key = (shape, rows, top_k, mode)
        if (name := self._names.get(key)) is None:
            name = self._names[key] = self._looked_up(replace(shape, top_k=top_k), rows, mode)
        return name

    def _looked_up(self, shape: LayerShape, rows: int, mode: str) -> str:
        assert self._selection is not None  # set by prepare
        name = self._selection.of(mode).of(shape, rows)
        fits = self._compiles and shape.experts <= grouped.most_experts()
        if name == "grouped" and not fits:
            return "deep_gemm"
        return "triton" if name == "vllm_cuda" and shape.shared else name

    def forward_encoded(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        dtype: torch.dtype,
        load: SlotLoad | None = None,
    ) -> torch.Tensor:
        if self._vllm is not None and self.chosen(layer, *topk_ids.shape) == "vllm_cuda":
            return self._vllm.forward_encoded(layer, rows, topk_ids, topk_weights, dtype, load)
        return super().forward_encoded(layer, rows, topk_ids, topk_weights, dtype, load)

    def _compute(
        self,
        layer: int,
        rows: EncodedRows,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor,
        load: SlotLoad | None,
    ) -> None:
        many = self.chosen(layer, *topk_ids.shape) in ("deep_gemm", "grouped")
        backend = DeepGemmBackend if many else TritonBackend
        backend._compute(self, layer, rows, topk_ids, topk_weights, out, load)

    def _activation(
        self, held: Layer, rows: EncodedRows, placed: PlacedPairs, top_k: int, layout: SlotLayout
    ) -> Operand:
        return self._products(held, len(rows), top_k)._activation(
            self, held, rows, placed, top_k, layout
        )

    def _results(
        self,
        held: Layer,
        a: Operand,
        placed: PlacedPairs,
        rows: int,
        top_k: int,
        layout: SlotLayout,
    ) -> torch.Tensor:
        return self._products(held, rows, top_k)._results(
            self, held, a, placed, rows, top_k, layout
        )

    def _products(self, held: Layer, rows: int, top_k: int) -> type[DeepGemmBackend]:
        ours = self._chosen(held.shape, rows, top_k) == "grouped"
        return GroupedBackend if ours else DeepGemmBackend
