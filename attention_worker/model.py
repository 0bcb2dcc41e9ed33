"""A vLLM model class whose expert layers are remote: built from the class vLLM ships."""

from collections.abc import Callable

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.sequence import IntermediateTensors

from afd.models import Family
from attention_worker.pipeline import Experts, run_layers
from attention_worker.routing import route


class LayerHalves:
    """One decoder layer as the pipeline sees it: an attention half, then a remote or local FFN.

    The attention half is the same in every supported family: norm, attention, residual, norm
    (vllm/model_executor/models/{qwen3_moe,deepseek_v2,step3_text}.py, the DecoderLayer.forward of
    each). Only the place of the router differs, and that is the family's data.
    """

    def __init__(self, layer: nn.Module, index: int, family: Family, is_remote: bool) -> None:
        self.index = index
        self.is_remote = is_remote
        self._input_norm = layer.input_layernorm
        self._self_attn = layer.self_attn
        self._attention_args = family.attention_args
        self._post_norm = layer.post_attention_layernorm
        self._mlp: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._gate: nn.Module | None = None
        self._runner: MoERunner | None = None
        if is_remote:
            self._gate = layer.get_submodule(family.gate)
            self._runner = layer.get_submodule(family.experts)
        else:
            self._mlp = layer.mlp

    def attention_half(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Input of the FFN and the new residual; all tensors model dtype [rows, hidden]."""
        if residual is None:
            residual = hidden
            hidden = self._input_norm(hidden)
        else:
            hidden, residual = self._input_norm(hidden, residual)
        hidden = self._self_attn(positions, hidden, *self._attention_args)
        return self._post_norm(hidden, residual)

    def route(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 and ids int32, both [rows, top_k], of a remote layer."""
        assert self._gate is not None and self._runner is not None
        logits, _ = self._gate(hidden)
        return route(self._runner, hidden, logits)

    def local_ffn(self, hidden: torch.Tensor) -> torch.Tensor:
        """The dense FFN of a layer without experts."""
        assert self._mlp is not None
        return self._mlp(hidden)


def disaggregated(base: type[nn.Module], family: Family) -> type[nn.Module]:
    """Subclass of the vLLM model class ``base`` whose ``forward`` is the layer pipeline."""

    class Disaggregated(base):
        """Attention half of the model: no expert weights, FFN calls over the transport."""

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.remote: Experts | None = None
            self._halves: list[LayerHalves] = []
            self.weight_bytes_read = self.weight_bytes_held = 0  # set by the loader
            for layer in self.model.layers:
                drop_shared_experts(layer, family)

        def attach(self, remote: Experts, moe_layers: tuple[int, ...]) -> None:
            """Connect the model to the FFN instances; called once, after the weights are in."""
            self.remote = remote
            self._halves = [
                LayerHalves(layer, index, family, index in moe_layers)
                for index, layer in enumerate(self.model.layers)
            ]

        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: IntermediateTensors | None = None,
            inputs_embeds: torch.Tensor | None = None,
        ) -> torch.Tensor:
            """Final hidden states, model dtype [tokens, hidden]."""
            assert self.remote is not None, "attach() comes before the first forward"
            hidden = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
            return run_layers(self._halves, self.model.norm, self.remote, hidden, positions)

    Disaggregated.__name__ = Disaggregated.__qualname__ = f"Afd{base.__name__}"
    return Disaggregated


def drop_shared_experts(layer: nn.Module, family: Family) -> None:
    """Free the shared-expert modules that vLLM built: their weights live on the FFN instances.

    They are never loaded, and removed here so that vLLM's check for uninitialised parameters and
    the memory profile see the truth.
    """
    for path in family.shared:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = layer.get_submodule(parent_path) if parent_path else layer
        except AttributeError:  # a dense layer has no MoE block
            continue
        if name in parent._modules:
            setattr(parent, name, None)
