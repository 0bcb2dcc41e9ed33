"""Backend for NVIDIA Hopper: of four that take the same weights, for each batch the quickest."""

from dataclasses import replace

import torch

from afd.wire.rows_torch import EncodedRows
from ffn_worker.kernels import grouped
from ffn_worker.load import SlotLoad
from ffn_worker.moe.choice import ChoicesByMode, choices_of
from ffn_worker.moe.deep_gemm import Cut, DeepGemmBackend, Operand
from ffn_worker.moe.device import launch_mode
from ffn_worker.moe.grouped import GroupedBackend, cannot_compile
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.sorting import PlacedPairs
from ffn_worker.moe.tiles import LayerShape
from ffn_worker.moe.triton import Layer, TritonBackend
from ffn_worker.moe.vllm_cuda import VllmCudaBackend


class HopperBackend(GroupedBackend):
    """The Triton kernels, DeepGEMM, products of ours, or vLLM's fused experts, as the
    device's tuning file has it (:mod:`ffn_worker.moe.choice`), for a call that is captured and for
    one that the host launches.

    A shared expert, which is small, is held for all but vLLM's kernels, which have no such thing
    and are not taken then.
    """

    def __init__(self, experts: tuple[int, int], num_experts: int | None = None) -> None:
        super().__init__(experts, num_experts)
        self._choices: ChoicesByMode | None = None
        self._vllm: VllmCudaBackend | None = None
        self._compiles = cannot_compile() is None
        self._names: dict[tuple[LayerShape, int, int, str], str] = {}  # looked up so far

    @staticmethod
    def unavailable(dtype: torch.dtype, hidden: int, intermediate: int) -> str | None:
        return DeepGemmBackend.unavailable(dtype, hidden, intermediate)

    def prepare(self, layer: int, w13: Weight, w2: Weight) -> None:
        DeepGemmBackend.prepare(self, layer, w13, w2)  # not refused for too many experts
        if self._choices is None:
            self._choices = choices_of(torch.cuda.get_device_name(w13.codes.device))
            if "vllm_cuda" in self._choices.names(w13.scheme.value):
                self._vllm = VllmCudaBackend((self.start, self.end), self.num_experts)
        if self._vllm is not None:
            self._vllm.prepare(layer, w13, w2)

    def prepare_shared(self, layer: int, gate_up: Weight, down: Weight) -> bool:
        joined = TritonBackend.prepare_shared(self, layer, gate_up, down)
        if joined and self._vllm is not None:
            self._vllm.release(layer)  # the weights without the shared expert in them
        return joined and super().prepare_shared(layer, gate_up, down)

    def release(self, layer: int) -> None:
        if self._vllm is not None and not self._layers[layer].shape.shared:
            self._vllm.release(layer)
        super().release(layer)

    def chosen(self, layer: int, rows: int, top_k: int) -> str:
        """Name of the backend that computes a batch."""
        return self._chosen(self._layers[layer].shape, rows, top_k)

    def _chosen(self, shape: LayerShape, rows: int, top_k: int) -> str:
        mode = launch_mode()
        key = (shape, rows, top_k, mode)
        if (name := self._names.get(key)) is None:
            name = self._names[key] = self._looked_up(replace(shape, top_k=top_k), rows, mode)
        return name

    def _looked_up(self, shape: LayerShape, rows: int, mode: str) -> str:
        assert self._choices is not None  # set by prepare
        name = self._choices.of(mode).of(shape, rows)
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
        self, held: Layer, rows: EncodedRows, placed: PlacedPairs, top_k: int, cut: Cut
    ) -> Operand:
        return self._products(held, len(rows), top_k)._activation(
            self, held, rows, placed, top_k, cut
        )

    def _results(
        self, held: Layer, a: Operand, placed: PlacedPairs, rows: int, top_k: int, cut: Cut
    ) -> torch.Tensor:
        return self._products(held, rows, top_k)._results(self, held, a, placed, rows, top_k, cut)

    def _products(self, held: Layer, rows: int, top_k: int) -> type[DeepGemmBackend]:
        ours = self._chosen(held.shape, rows, top_k) == "grouped"
        return GroupedBackend if ours else DeepGemmBackend
